"""How MLflow's store is asked, and what it says in plain words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kedro_mlflow.config.kedro_mlflow_config import KedroMlflowConfig
from mlflow.exceptions import MlflowException
from mlflow.store.db.utils import _get_managed_session_maker
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker

from ppo_rlhf.core.errors import ConfigError, TrackingStoreError
from ppo_rlhf.datasets.tracking_errors import one_line, short_timeouts
from ppo_rlhf.hooks.tracking_store import place_in_project, store_errors_as_config_errors

RETRIES, SECONDS = "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"


def test_for_a_while_a_server_that_does_not_answer_is_asked_less_often(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(RETRIES, raising=False)
    monkeypatch.setenv(SECONDS, "60")
    with short_timeouts():
        assert (os.environ[RETRIES], os.environ[SECONDS]) == ("1", "5")
    assert RETRIES not in os.environ
    assert os.environ[SECONDS] == "60"


@pytest.mark.parametrize(
    ("project", "uri"),
    [
        ("what?x=1", "sqlite:///mlflow.db"),
        ("my%20own", "sqlite:///mlflow.db"),
        ("project", "sqlite:///mlflow.db?timeout=5"),
        ("project", "sqlite:////a?b/c"),
    ],
)
def test_a_database_that_sqlalchemy_would_make_elsewhere_is_refused(tmp_path: Path, project: str, uri: str):
    settings = KedroMlflowConfig.model_validate({"server": {"mlflow_tracking_uri": uri}})
    reason = r"^/\S+: .*(\?|%20),.* server\.mlflow_tracking_uri "
    with pytest.raises(ConfigError, match=reason):
        place_in_project(settings, tmp_path / project)


def test_a_store_that_nothing_names_is_refused_and_the_environment_may_name_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = KedroMlflowConfig.model_validate({"server": {"mlflow_tracking_uri": None}})
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match=r"server\.mlflow_tracking_uri is null, and MLFLOW_TRACKING_URI is not set"):
        place_in_project(settings, tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///elsewhere.db")
    place_in_project(settings, tmp_path)
    assert settings.server.mlflow_tracking_uri is None


def test_an_error_is_one_line_without_what_sqlalchemy_adds():
    text = "(sqlite3.OperationalError) database\n is locked\n[SQL: INSERT INTO x]\n(Background on this error at: …)"
    assert one_line(MlflowException(text)) == "(sqlite3.OperationalError) database is locked"


def test_a_database_that_fails_is_one_line_without_a_traceback_also_where_no_logging_yml_is(
    capsys: pytest.CaptureFixture[str],
):
    session = _get_managed_session_maker(sessionmaker(create_engine("sqlite://")), "sqlite")
    refusal = pytest.raises(TrackingStoreError, match=r"^The store: .*no such table: lost$")
    with refusal, store_errors_as_config_errors("The store"), session() as opened:
        opened.execute(text("SELECT 1 FROM lost"))
    assert capsys.readouterr().err == ""


def test_an_error_of_the_store_is_one_line_without_a_password():
    assert one_line(MlflowException("no\nroute to http://me:secret@host")) == "no route to http://***@host"
