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
        ("https://h/f?a=b;token=secret#c&d=e;key=secret", "https://h/f?a=b;token=***&d=e;key=***"),
        ("hf://me:secret@datasets/org/set@v2", "hf://***@v2"),
        ("hf://hf_secret@datasets/org/set", "hf://***@datasets/org/set"),
        ("http://h/?pass%77ord=secret&api%5Fke%79=secret&a=b", "http://h/?pass%77ord=***&api%5Fke%79=***&a=b"),
        ("http://h/?next=http%3A%2F%2Fme%3Asecret%40host%2Fx", "http://h/?next=http%3A%2F%2F***%40host%2Fx"),
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
        *("http://h/?next=http%3A%2F%2Fhost%2Fx%40y", "hf://datasets/org/set@refs%2Fconvert/f"),
        *("a prompt's last token=3", "is that so? key=value", "see conf/base/globals.yml: x"),
    ],
)
def test_texts_without_secrets_stay(text: str):
    assert without_secrets(text) == text


def test_a_long_text_takes_no_time():
    for text in ("a" * 1_000_000, "?" + "a=b;" * 100_000):
        assert without_secrets(text) == text


def test_errors_of_this_project_have_no_secrets_wherever_they_are_shown():
    assert str(DataError("http://me:secret@host/x is no file")) == "http://***@host/x is no file"
    assert DivergenceError("at http://me:secret@host", 3).args == ("at http://***@host",)
