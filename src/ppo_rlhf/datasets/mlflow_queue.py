"""MLflow's review queues: `put` shows pairs to people, `get` reads people's answers.

Only this module calls `mlflow.genai`, which MLflow 3.17 marks as experimental. The files of `pair_tables` are what the
rest of the package reads and writes: a queue shows pairs of such a file, and its answers become such a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import AssessmentSourceType, SpanType
from mlflow.entities.trace_location import MlflowExperimentLocation

from ppo_rlhf.core.addresses import without_secrets
from ppo_rlhf.core.errors import ConfigError, DataError
from ppo_rlhf.datasets.search_filters import equals
from ppo_rlhf.datasets.tracking_errors import STORE_ERRORS, one_line, short_timeouts
from ppo_rlhf.people.answers import ANSWER, ANSWERS, NUMBER, PERSON, RATIONALE, TIME, Comparison
from ppo_rlhf.people.pair_page import page

SCHEME = "mlflow:"
"""A path with the prefix `mlflow:` names a review queue."""
QUESTION = "preferred"
"""The name of the question in MLflow."""
TITLE = "Which response is better?"
QUEUE_TAG, NUMBER_TAG = "feedback.queue", "feedback.number"
"""Tags of a pair's trace: the review queue, and the number of the pair. Neither reveals which policy is A."""
_PAGE = 100
_PART = 200
"""Number of traces that are written, or added to a queue, at a time: MLflow drops what its export queue of 1,000 cannot
hold, and a server takes too long over a request of many hundred traces."""
_SQLITE = "sqlite:///"


@dataclass
class Place:
    """A project's tracking store and experiment, from mlflow.yml; a hook sets both when Kedro's context is created."""

    uri: str = ""
    experiment: str = ""
    ui: str = "http://127.0.0.1:5000"  # address of MLflow's web page, which `kedro mlflow ui` starts

    @property
    def has_server(self) -> bool:
        """Whether the tracking store is a server, which also serves MLflow's page."""
        return self.uri.startswith("http")


place = Place()


def put(queue: str, pairs: Sequence[Comparison], instruction: str) -> str:
    """Add the pairs that a review queue does not have yet, and return the address of the queue's page.

    Each pair is one trace. The queue is created if it does not exist. A pair is added only after the store has shown
    that it keeps the pair's whole page, so a call that was stopped or refused can be repeated.

    Raises:
        ConfigError: The store does not keep a pair as it is shown, does not support review queues, or has a question or
            queue of this name that asks something else.
    """
    from mlflow.genai import review_queues

    with _asked(queue) as experiment:
        queue_id = _queue_asking(queue, experiment, instruction)
        known = {_number_of(trace) for trace in _traces(queue, experiment)}
        new = [pair for pair in pairs if pair.number not in known]
        for start in range(0, len(new), _PART):
            for pair in new[start : start + _PART]:
                _write(pair, queue, experiment)
            mlflow.flush_trace_async_logging()
        kept = {_number_of(trace): trace for trace in _traces(queue, experiment)}
        lost = [pair for pair in pairs if not _is_whole(pair, kept.get(pair.number))]
        if lost:
            written = [kept[pair.number].trace_id for pair in new if pair.number in kept]
            if written:
                mlflow.MlflowClient().delete_traces(experiment, trace_ids=written)
            raise ConfigError(
                f"mlflow:{queue}: MLflow does not keep {len(lost)} of {len(pairs)} pairs as people must see them, so "
                "no pair was added. PostgreSQL keeps 1,000 characters, SQLite all; MLFLOW_TRACE_SAMPLING_RATIO and "
                "mlflow.tracing.disable() drop pairs. Change this, or let people answer the file of the pairs."
            )
        trace_ids = [kept[pair.number].trace_id for pair in pairs]
        for start in range(0, len(trace_ids), _PART):
            review_queues.add_items_to_review_queue(queue_id, item_ids=trace_ids[start : start + _PART])
    server = without_secrets(place.uri).replace("***@", "").rstrip("/") if place.has_server else place.ui
    return f"{server}/#/experiments/{experiment}/review-queue?selectedQueueId={queue_id}"


def get(queue: str) -> list[dict[str, Any]]:
    """Return people's answers about the pairs of a review queue as rows of an answers' file, the newest answer last.

    Raises:
        DataError: The experiment has no pairs of the queue, or nobody has answered one.
        ConfigError: The store cannot be read.
    """
    with _asked(queue) as experiment:
        traces = _traces(queue, experiment)
    if not traces:
        raise DataError(
            f"mlflow:{queue}: the experiment {place.experiment} has no pairs of this queue. Correct the name, or run "
            "`kedro run --pipelines collect_feedback`."
        )
    given: list[tuple[int, Any]] = [
        (_number_of(trace), each)
        for trace in traces
        for each in trace.assessments
        if each.name == QUESTION and each.source.source_type == AssessmentSourceType.HUMAN
        if each.valid is not False and each.feedback is not None
    ]
    if not given:
        raise DataError(f"mlflow:{queue}: nobody has answered one of the {len(traces)} pairs yet. Let people answer.")
    return [
        {
            NUMBER: number,
            ANSWER: each.feedback.value,
            PERSON: each.source.source_id,
            TIME: datetime.fromtimestamp(each.last_update_time_ms / 1000, UTC).isoformat(timespec="milliseconds"),
            RATIONALE: each.rationale or "",
        }
        for number, each in sorted(given, key=lambda pair: (pair[1].last_update_time_ms, pair[0]))
    ]


def _queue_asking(queue: str, experiment: str, instruction: str) -> str:
    """Return the id of a review queue that asks which response is better; create the queue if it does not exist."""
    from mlflow.genai import label_schemas, review_queues

    asked = {each.name: each for each in _pages(label_schemas.list_label_schemas, experiment_id=experiment)}
    question = asked.get(QUESTION) or label_schemas.create_label_schema(
        QUESTION,
        type="feedback",
        input=label_schemas.InputCategorical([*ANSWERS]),
        instruction=instruction,
        enable_comment=True,
        experiment_id=experiment,
    )
    options = getattr(question.input, "options", None)
    if options != [*ANSWERS]:
        raise ConfigError(
            f"MLflow's experiment {place.experiment} has a question `{QUESTION}` with the answers {options}, not "
            f"{[*ANSWERS]}. Rename the question in MLflow, or set another tracking.experiment.name in "
            "conf/local/mlflow.yml."
        )
    if question.instruction != instruction:
        label_schemas.update_label_schema(str(question.schema_id), instruction=instruction)
    queues = {each.name: each for each in _pages(review_queues.list_review_queues, experiment_id=experiment)}
    found = queues.get(queue) or review_queues.create_review_queue(
        queue, queue_type="custom", schema_ids=[str(question.schema_id)], experiment_id=experiment
    )
    if question.schema_id not in found.schema_ids:
        raise ConfigError(f"MLflow's queue {queue} does not ask `{QUESTION}`. Set feedback.queue to another name.")
    return str(found.queue_id)


def _traces(queue: str, experiment: str) -> list[Any]:
    """Return what MLflow knows of the pairs of a review queue (mlflow.entities.TraceInfo), the oldest first."""
    search = mlflow.MlflowClient().search_traces
    query = equals(f"tags.`{QUEUE_TAG}`", queue)
    found = _pages(search, locations=[experiment], filter_string=query, include_spans=False)
    traces = [trace.info for trace in found if re.fullmatch("[0-9]+", trace.info.tags.get(NUMBER_TAG, ""))]
    return sorted(traces, key=lambda info: info.request_time)


def _number_of(trace: Any) -> int:
    return int(trace.tags[NUMBER_TAG])


def _is_whole(pair: Comparison, trace: Any) -> bool:
    return trace is not None and (trace.request_preview, trace.response_preview) == page(pair)


def _write(pair: Comparison, queue: str, experiment: str) -> None:
    """Create a pair's trace. MLflow's review page shows a trace's previews, which MLflow would cut by itself."""
    request, response = page(pair)
    with mlflow.start_span(TITLE, SpanType.CHAT_MODEL, trace_destination=MlflowExperimentLocation(experiment)) as span:
        span.set_inputs({"messages": [{"role": "user", "content": request}]})
        span.set_outputs({"choices": [{"message": {"role": "assistant", "content": response}}]})
        tags = {QUEUE_TAG: queue, NUMBER_TAG: str(pair.number)}
        mlflow.update_current_trace(tags, request_preview=request, response_preview=response)


def _pages(listing: Any, **query: Any) -> Iterator[Any]:
    """Yield the items of all pages of one of MLflow's lists."""
    token = None
    while True:
        found = listing(**query, max_results=_PAGE, page_token=token)
        yield from found
        token = found.token
        if not token:
            return


@contextmanager
def _asked(queue: str) -> Iterator[str]:
    """Use the project's tracking store within the block, with short timeouts; yield the id of its experiment.

    Raises:
        ConfigError: The process has no Kedro context, or the store cannot be used; in one line.
        DataError: The store or its experiment does not exist.
    """
    if not place.uri:
        raise ConfigError("Review queues need a Kedro session of the project, which reads the project's mlflow.yml.")
    shown = without_secrets(place.uri)
    # Check that the SQLite database exists, because MLflow would create a missing database
    if place.uri.startswith(_SQLITE) and not Path(place.uri.removeprefix(_SQLITE)).exists():
        raise DataError(f"mlflow:{queue}: {shown} does not exist yet. Run `kedro run --pipelines collect_feedback`.")
    before = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
    mlflow.set_tracking_uri(place.uri)
    try:
        with short_timeouts():
            experiment = mlflow.get_experiment_by_name(place.experiment)
            if experiment is None or experiment.lifecycle_stage != "active":
                raise DataError(f"mlflow:{queue}: the store {shown} has no experiment {place.experiment}.")
            yield str(experiment.experiment_id)
    except (NotImplementedError, *STORE_ERRORS) as error:
        why = one_line(error)
        if isinstance(error, NotImplementedError) or " 404 " in why:
            why = "it has no review queues, which need MLflow 3.14 or later and a database"
        raise ConfigError(f"mlflow:{queue}: the tracking store {shown} cannot be used: {why}") from error
    finally:
        mlflow.set_tracking_uri(before)  # type: ignore[arg-type]  # None restores the default
