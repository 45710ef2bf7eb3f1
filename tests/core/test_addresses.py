"""Messages have no user name, password or token of an address, and everything else as it stands."""

import pytest

from ppo_rlhf.core.addresses import without_secrets
from ppo_rlhf.core.errors import DataError, DivergenceError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgresql://me:secret@db:5432/x?a=b", "postgresql://***@db:5432/x?a=b"),
        ("no reply of https://me:a:b@c@host, asked twice", "no reply of https://***@host, asked twice"),
        ("http://me:s3/cret@host:5000", "http://***@host:5000"),
        ("\x1b[31mhttp://me:secret@host", "\x1b[31mhttp://***@host"),
        ("at地址http://me:secret@host", "at地址http://***@host"),
        ("_http://me:secret@host", "_http://***@host"),
        (
            "https://h/x?accessKey=a&code=b&pass=c&passphrase=d",
            "https://h/x?accessKey=***&code=***&pass=***&passphrase=***",
        ),
        ("http://TOKEN@host:5000", "http://***@host:5000"),
        ("http://a@mail:secret@host", "http://***@host"),
        ("p/http:/me:secret@host/x", "p/http:/***@host/x"),
        ("HTTP://me:secret@host", "HTTP://***@host"),
        ("git+ssh://me:secret@host", "git+ssh://***@host"),
        ("mysql://db/x?user=me&password=secret&a=b", "mysql://db/x?user=me&password=***&a=b"),
        ("'http://h/v1?token=secret': no route", "'http://h/v1?token=***': no route"),
        ("with url: /x?token=secret/api/2.0 (Caused", "with url: /x?token=*** (Caused"),
        ("s3://b/f?X-Amz-Signature=a%2Fb&X-Amz-Credential=c", "s3://b/f?X-Amz-Signature=***&X-Amz-Credential=***"),
        ("https://h/v1?api_key=secret, and http://me:secret@h", "https://h/v1?api_key=***, and http://***@h"),
        ("https://h/f#access_token=secret", "https://h/f#access_token=***"),
        ("https://h/f?key=a&auth=b&X-Api-Key=c", "https://h/f?key=***&auth=***&X-Api-Key=***"),
    ],
)
def test_secrets_of_addresses_are_hidden(text: str, expected: str):
    assert without_secrets(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("http://host:5000", "http://host:5000/x?split=train", "sqlite:////folder:1/me@home.db", "me@home: who?"),
        *("hf://datasets/org/set@v2/data.csv", "https://hub/org/name@v1.0", "org/name@main:train", "ratio: 1/2@3"),
        *("http://h/#/runs?viewStateShareKey=a", "http://h/?author=me", "http://h/?monkey=3"),
        *("a prompt's last token=3", "is that so? key=value", "see conf/base/globals.yml: x"),
    ],
)
def test_texts_without_secrets_stay(text: str):
    assert without_secrets(text) == text


def test_errors_of_this_project_have_no_secrets_wherever_they_are_shown():
    assert str(DataError("http://me:secret@host/x is no file")) == "http://***@host/x is no file"
    assert DivergenceError("at http://me:secret@host", 3).args == ("at http://***@host",)
