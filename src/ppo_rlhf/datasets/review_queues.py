"""MLflow's review queues. Only this module calls `mlflow.genai.review_queues` and `label_schemas`, which MLflow 3.17
marks as experimental.

Each pair of responses is one trace in MLflow. The attributes of the trace's span hold the exact texts of the prompt and
the responses; `pair_page` writes what MLflow's page shows. A program that asks people by files needs none of this:
`pair_tables` writes the pairs and reads the answers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import mlflow
import pandas as pd
from mlflow.entities import AssessmentSource, AssessmentSourceType, SpanType
from mlflow.entities.trace_location import MlflowExperimentLocation
from mlflow.exceptions import MlflowException
from mlflow.tracing.constant import TraceMetadataKey

from ppo_rlhf.core.errors import ConfigError, DataError
from ppo_rlhf.datasets import pair_page
from ppo_rlhf.datasets.tracking_errors import STORE_ERRORS, one_line, short_timeouts, without_password
from ppo_rlhf.models.quiet import errors_only
from ppo_rlhf.runtime.processes import is_main_process
from ppo_rlhf.supervised.people_answers import ANSWERS, Answer, Comparison, warn_of_others

if TYPE_CHECKING:
    from mlflow.entities import Trace
    from mlflow.genai.review_queues import ReviewQueue

SCHEME = "mlflow:"
"""A path with the prefix `mlflow:` names a review queue."""
QUESTION = "preferred"
"""The name of the question in MLflow."""
TITLE = "Which response is better?"
TABLE = "feedback/feedback_pairs.parquet"
"""Artifact of a run of collect_feedback of an earlier version: which policy each response is from."""
QUEUE = "feedback.queue"
"""Tag of a trace: the name of the review queue for which the trace was created."""
PROMPT, TOOLS, NUMBER = "feedback.prompt", "feedback.tools", "feedback.number"
RESPONSES = {"response_a": "feedback.response_a", "response_b": "feedback.response_b"}
CUT_OFF = {"cut_off_a": "feedback.cut_off_a", "cut_off_b": "feedback.cut_off_b"}
"""Attributes of a trace's span. None of them reveals which policy is A."""
_PAGE = 100
_COLUMN = 1_000
"""Number of characters that every store keeps of what MLflow's page shows."""
_PART = 200
"""Number of traces that are written, or added to a queue, at a time: MLflow drops what its export queue of 1,000 cannot
hold, and a server takes too long over a request of many hundred traces."""
_SQLITE = "sqlite:///"
_MISSING, _UNKNOWN_ADDRESS = "RESOURCE_DOES_NOT_EXIST", "ENDPOINT_NOT_FOUND"

logger = logging.getLogger(__name__)


@dataclass
class Place:
    """A project's tracking store and experiment, from mlflow.yml; a hook sets both when Kedro's context is created."""

    uri: str = ""
    experiment: str = ""
    ui: str = "http://127.0.0.1:5000"  # address of MLflow's web page, which `kedro mlflow ui` starts


place = Place()


def queues_here() -> ReviewQueues:
    """Return the review queues of the project's experiment.

    Raises:
        ConfigError: The process has not created a Kedro context of a project.
    """
    if not place.uri:
        raise ConfigError("Review queues need a Kedro session of the project, which reads the project's mlflow.yml.")
    return ReviewQueues(place.uri, place.experiment)


def queues_of_run() -> ReviewQueues:
    """Return the review queues of the project's experiment, for a run that MLflow tracks.

    Raises:
        ConfigError: MLflow does not track the run, so nothing would record which policy each response is from.
    """
    if mlflow.active_run() is None and is_main_process():
        raise ConfigError(
            "collect_feedback stores the pairs and their sides in its MLflow run, but tracking is disabled for this "
            "pipeline. Remove collect_feedback from tracking.disable_tracking.pipelines in mlflow.yml."
        )
    return queues_here()


class ReviewQueues:
    """The review queues of one experiment in a tracking store."""

    def __init__(self, uri: str, experiment: str) -> None:
        """Store the address of the tracking store and the experiment's name; no request is sent."""
        self.uri, self.experiment = uri, experiment

    def read(self, queue: str) -> list[Comparison]:
        """Return the pairs of responses of a review queue with people's answers, in order of creation.

        Traces without a pair of responses and answers that are not in `ANSWERS` are left out with a warning. MLflow
        removes a deleted trace from its review queues.

        Raises:
            DataError: The experiment does not have the review queue, or the review queue has no pairs.
            ConfigError: The store cannot be read, or does not support review queues.
        """
        with self._asked(queue):
            review_queue = self._find(queue)
            self._check_question(review_queue)
            items = self._items(review_queue)
            traces = self._traces(queue, review_queue.experiment_id)
            for item in items:
                if item not in traces and (trace := _trace(item)) is not None:
                    traces[item] = trace
        pairs = [_comparison(traces[item]) for item in items if item in traces]
        comparisons = [pair for pair in pairs if pair is not None]
        if lost := len(items) - len(comparisons):
            logger.warning("mlflow:%s: %d of %d traces hold no pair and are left out.", queue, lost, len(items))
        if not comparisons:
            raise DataError(f"mlflow:{queue}: this queue has no pairs. Run `kedro run --pipelines collect_feedback`.")
        warn_of_others(f"mlflow:{queue}", [other for comparison in comparisons for other in comparison.others])
        return sorted(comparisons, key=lambda comparison: comparison.number)

    def table_of_run(self, run_id: str) -> pd.DataFrame | None:
        """Return the table `TABLE` of a run of collect_feedback; None if the run or the table was deleted."""
        with self._asked(TABLE), TemporaryDirectory() as folder:
            try:
                names = [file.path for file in mlflow.MlflowClient().list_artifacts(run_id, "feedback")]
            except MlflowException as error:
                if error.error_code != _MISSING:
                    raise
                return None
            if TABLE not in names:
                return None
            place = mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path=TABLE, dst_path=folder)
            return pd.read_parquet(place)

    def exists(self, queue: str) -> bool:
        """Return whether the experiment has the review queue."""
        with self._asked(queue):
            try:
                self._find(queue)
            except DataError:
                return False
        return True

    def has_pairs(self, queue: str) -> bool:
        """Return whether the experiment has the review queue and the review queue is not empty."""
        with self._asked(queue):
            return self.exists(queue) and bool(self._items(self._find(queue)))

    def prepare(self, queue: str, instruction: str) -> None:
        """Create a review queue that asks which response is better, unless the queue exists, and update its
        instruction.

        Raises:
            ConfigError: The experiment has a question `QUESTION` with other answers than `ANSWERS`, the review queue
                does not ask `QUESTION`, or the store does not support review queues.
        """
        from mlflow.genai import label_schemas, review_queues

        with self._asked(queue):
            experiment = self._experiment_id(queue)
            question = next(
                iter(s for s in _pages(label_schemas.list_label_schemas, experiment) if s.name == QUESTION), None
            )
            if question is None:
                question = label_schemas.create_label_schema(
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
                    f"MLflow's experiment {self.experiment} has a question `{QUESTION}` with the answers {options}, "
                    f"not {[*ANSWERS]}. Rename the question in MLflow, or set another tracking.experiment.name in "
                    "conf/local/mlflow.yml."
                )
            if question.instruction != instruction:
                label_schemas.update_label_schema(str(question.schema_id), instruction=instruction)
            try:
                questions = review_queues.get_review_queue(name=queue, experiment_id=experiment).schema_ids
            except MlflowException as error:
                if error.error_code != _MISSING:
                    raise
                questions = review_queues.create_review_queue(
                    queue, queue_type="custom", schema_ids=[question.schema_id], experiment_id=experiment
                ).schema_ids
            if question.schema_id not in questions:
                raise ConfigError(
                    f"MLflow's queue {queue} does not ask `{QUESTION}`: the queue was not created by this package. Set "
                    "feedback.queue to another name."
                )

    def write(self, queue: str, comparisons: Sequence[Comparison]) -> list[str]:
        """Create a trace for each pair of responses and return the traces' ids, without adding the traces to the review
        queue.

        Raises:
            ConfigError: MLflow's tracing is disabled, or the store did not keep a trace.
        """
        with self._asked(queue):
            experiment = self._experiment_id(queue)
            trace_ids: list[str] = []
            for start in range(0, len(comparisons), _PART):
                for each in comparisons[start : start + _PART]:
                    trace_ids.append(_start(_page(each), experiment, {QUEUE: queue}, _attributes(each)))
                mlflow.flush_trace_async_logging()
            written = self._traces(queue, experiment)
        missing = [trace_id for trace_id in trace_ids if trace_id not in written]
        if missing:
            raise ConfigError(
                f"MLflow did not keep {len(missing)} of {len(trace_ids)} traces. Tracing must be enabled without "
                "sampling: unset MLFLOW_TRACE_SAMPLING_RATIO, and do not call mlflow.tracing.disable()."
            )
        return trace_ids

    def shows_whole(self, pairs: Sequence[Comparison]) -> bool:
        """Return whether the store keeps what MLflow's page shows of the longest pair.

        MLflow's tables have 1,000 characters for it, which SQLite does not enforce. A trace of its own tries it, and is
        deleted.
        """
        pages = [_page(pair) for pair in pairs]
        longest = max(pages, key=lambda page: max(map(len, page)), default=("", ""))
        if max(map(len, longest)) <= _COLUMN:
            return True
        with self._asked(TITLE), errors_only("mlflow.tracing", logging.CRITICAL):
            experiment = self._experiment_id(TITLE)
            trace_id = _start(longest, experiment)
            mlflow.flush_trace_async_logging()
            kept = _trace(trace_id)
            if kept is not None:
                mlflow.MlflowClient().delete_traces(experiment, trace_ids=[trace_id])
        return kept is not None and (kept.info.request_preview, kept.info.response_preview) == longest

    def attach(self, queue: str, trace_ids: Sequence[str]) -> None:
        """Add traces to a review queue. A trace that is already in the review queue keeps its state."""
        from mlflow.genai import review_queues

        for start in range(0, len(trace_ids), _PART):
            with self._asked(queue):
                part = [*trace_ids[start : start + _PART]]
                review_queues.add_items_to_review_queue(self._find(queue).queue_id, item_ids=part)

    def answer(self, queue: str, trace_id: str, value: str, person: str, rationale: str = "") -> None:
        """Record an answer to a pair of responses from a script, with the same effect as an answer on MLflow's page.

        The answer is recorded as `person`'s answer, and the pair is marked complete in the review queue.
        """
        from mlflow.genai import review_queues

        source = AssessmentSource(AssessmentSourceType.HUMAN, person)
        with self._asked(queue):
            mlflow.log_feedback(trace_id=trace_id, name=QUESTION, value=value, source=source, rationale=rationale)
            queue_id = self._find(queue).queue_id
            review_queues.set_review_queue_item_status(
                queue_id, item_id=trace_id, status="complete", completed_by=person
            )

    def waiting(self, queue: str) -> list[Comparison]:
        """Return the whole pairs that a stopped run created for a review queue but did not add to the review queue."""
        with self._asked(queue):
            experiment = self._experiment_id(queue)
            attached = {*self._items(self._find(queue))} if self.exists(queue) else set()
            traces = self._traces(queue, experiment)
        pairs = [_comparison(trace) for trace_id, trace in traces.items() if trace_id not in attached]
        return sorted(filter(None, pairs), key=lambda pair: pair.number)

    def address(self, queue: str) -> str:
        """Return the URL of a review queue's page on the tracking server, else on `kedro mlflow ui`."""
        server = without_password(self.uri).replace("***@", "").rstrip("/") if self.has_server else place.ui
        with self._asked(queue):
            review_queue = self._find(queue)
            page = f"experiments/{review_queue.experiment_id}/review-queue?selectedQueueId={review_queue.queue_id}"
        return f"{server}/#/{page}"

    @property
    def has_server(self) -> bool:
        """Whether the tracking store is a server, which also serves MLflow's page."""
        return self.uri.startswith("http")

    def _find(self, queue: str) -> ReviewQueue:
        from mlflow.genai import review_queues

        experiment = self._experiment_id(queue)
        try:
            return review_queues.get_review_queue(name=queue, experiment_id=experiment)
        except MlflowException as error:
            if error.error_code != _MISSING:
                raise
        named = [each.name for each in _pages(review_queues.list_review_queues, experiment)]
        elsewhere = [
            each.name
            for each in mlflow.search_experiments(max_results=_PAGE)
            if any(other.name == queue for other in _pages(review_queues.list_review_queues, each.experiment_id))
        ]
        hint = f"; its queues are {', '.join(named)}" if named else ""
        if elsewhere:
            hint += (
                f". The experiment {elsewhere[0]} has a queue of this name: set tracking.experiment.name to "
                f"{elsewhere[0]} in mlflow.yml"
            )
        raise DataError(f"mlflow:{queue}: no such queue in MLflow's experiment {self.experiment}{hint}.")

    def _check_question(self, queue: ReviewQueue) -> None:
        """Raise `DataError` if somebody renamed or removed the question whose answers are read."""
        from mlflow.genai import label_schemas

        asked = _pages(label_schemas.list_label_schemas, queue.experiment_id)
        names = [each.name for each in asked if each.schema_id in queue.schema_ids]
        if QUESTION not in names:
            raise DataError(
                f"mlflow:{queue.name}: this queue asks {', '.join(names) or 'nothing'}, not `{QUESTION}`. Rename the "
                f"question to {QUESTION} in MLflow; the answers under its other name are not read."
            )

    def _experiment_id(self, queue: str) -> str:
        experiment = mlflow.get_experiment_by_name(self.experiment)
        if experiment is None or experiment.lifecycle_stage != "active":
            raise DataError(
                f"mlflow:{queue}: the store {without_password(self.uri)} has no experiment {self.experiment}."
            )
        return str(experiment.experiment_id)

    def _items(self, queue: ReviewQueue) -> list[str]:
        from mlflow.genai import review_queues

        items: list[str] = []
        token = None
        while True:
            page = review_queues.list_review_queue_items(queue.queue_id, max_results=_PAGE, page_token=token)
            items += [item.item_id for item in page]
            token = page.token
            if not token:
                return items

    def _traces(self, queue: str, experiment: str) -> dict[str, Trace]:
        """Return the traces that were created for a review queue, by trace id."""
        client, traces, token = mlflow.MlflowClient(), dict[str, Any](), None
        while True:
            page = client.search_traces(
                locations=[experiment],
                filter_string=f"tags.`{QUEUE}` = '{queue}'",
                max_results=_PAGE,
                page_token=token,
            )
            traces |= {trace.info.trace_id: trace for trace in page}
            token = page.token
            if not token:
                return traces

    @contextmanager
    def _asked(self, queue: str) -> Iterator[None]:
        """Use the project's tracking store within the block, with short timeouts; raise its errors in one line."""
        shown = without_password(self.uri)
        # Check that the SQLite database exists, because MLflow would create a missing database
        if self.uri.startswith(_SQLITE) and not Path(self.uri.removeprefix(_SQLITE)).exists():
            raise DataError(
                f"mlflow:{queue}: {shown} does not exist yet. Run `kedro run --pipelines collect_feedback`."
            )
        before = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
        if before != self.uri:
            mlflow.set_tracking_uri(self.uri)
        try:
            with short_timeouts():
                yield
        except (NotImplementedError, AttributeError, ImportError) as error:
            raise ConfigError(self._without_queues(shown)) from error
        except STORE_ERRORS as error:
            if getattr(error, "error_code", "") == _UNKNOWN_ADDRESS or " 404 " in str(error):
                raise ConfigError(self._without_queues(shown)) from error
            raise ConfigError(
                f"mlflow:{queue}: the tracking store {shown} cannot be used: {one_line(error)}"
            ) from error
        finally:
            if before != self.uri:
                mlflow.set_tracking_uri(before)  # type: ignore[arg-type]  # None restores the default

    def _without_queues(self, shown: str) -> str:
        return (
            f"The tracking store {shown} has no review queues: they need MLflow 3.14 or later and a database. Upgrade "
            "the server, or set server.mlflow_tracking_uri in mlflow.yml to a database."
        )


def _pages(listing: Any, experiment: str) -> Iterator[Any]:
    token = None
    while True:
        page = listing(experiment_id=experiment, max_results=_PAGE, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _trace(trace_id: str) -> Trace | None:
    try:
        return mlflow.MlflowClient().get_trace(trace_id)
    except MlflowException as error:
        if error.error_code == _MISSING:
            return None
        raise


def _attributes(each: Comparison) -> dict[str, Any]:
    tools = {} if each.tools is None else {TOOLS: each.tools}
    given = {PROMPT: each.prompt, **tools, NUMBER: each.number}
    return given | {name: getattr(each, field) for field, name in (RESPONSES | CUT_OFF).items()}


def _comparison(trace: Trace) -> Comparison | None:
    """Return the pair that a trace holds; None if its span is missing, for example because the run was killed."""
    span = next((span for span in trace.data.spans if span.parent_id is None), None)
    attributes = {} if span is None else span.attributes
    if not {PROMPT, *RESPONSES.values(), NUMBER} <= attributes.keys():
        return None
    texts: Any = {field: attributes[name] for field, name in RESPONSES.items()}
    cut_off: Any = {field: bool(attributes.get(name)) for field, name in CUT_OFF.items()}
    newest: dict[str, Any] = {}
    answers: list[Any] = [each for each in trace.info.assessments if each.name == QUESTION and each.valid is not False]
    for each in sorted(answers, key=lambda each: each.last_update_time_ms):
        if each.source.source_type == AssessmentSourceType.HUMAN and each.feedback is not None:
            newest[each.source.source_id] = each
    return Comparison(
        number=int(attributes[NUMBER]),
        prompt=attributes[PROMPT],
        tools=attributes.get(TOOLS),
        **texts,
        **cut_off,
        answers=tuple(_answer(person, each) for person, each in newest.items() if each.feedback.value in ANSWERS),
        trace_id=trace.info.trace_id,
        run_id=trace.info.trace_metadata.get(TraceMetadataKey.SOURCE_RUN, ""),
        others=tuple(str(each.feedback.value) for each in newest.values() if each.feedback.value not in ANSWERS),
    )


def _answer(person: str, given: Any) -> Answer:
    when = datetime.fromtimestamp(given.last_update_time_ms / 1000, UTC).isoformat(timespec="seconds")
    return Answer(given.feedback.value, person, when, given.rationale or "")


def _page(pair: Comparison) -> tuple[str, str]:
    """Return the question and the responses as MLflow's page shows them."""
    cut_off = {field: getattr(pair, field) for field in CUT_OFF}
    return pair_page.question(pair.prompt, pair.tools), pair_page.responses(pair.response_a, pair.response_b, **cut_off)


def _start(
    page: tuple[str, str],
    experiment: str,
    tags: dict[str, str] | None = None,
    attributes: dict[str, Any] | None = None,
) -> str:
    """Create a trace and return its id. MLflow's review page shows a trace's previews, which MLflow would cut."""
    request, response = page
    place = MlflowExperimentLocation(experiment)
    with mlflow.start_span(TITLE, SpanType.CHAT_MODEL, attributes, trace_destination=place) as span:
        span.set_inputs({"messages": [{"role": "user", "content": request}]})
        span.set_outputs({"choices": [{"message": {"role": "assistant", "content": response}}]})
        mlflow.update_current_trace(tags, request_preview=request, response_preview=response)
    return str(span.trace_id)
