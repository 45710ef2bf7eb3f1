"""Hide the passwords and tokens of addresses in messages."""

import re
from urllib.parse import unquote

# A password may have a slash or another @. Paths such as `hf://datasets/owner/name@revision` have an @, too, but behind
# a slash. Paths of files lose a slash: `pathlib` writes http:/user:password@host. Whatever stands before a scheme may
# be glued to it. An address inside another one is percent-coded. Lengths are bounded so that a long text takes no time
_LOGIN = re.compile(r"(?i)(?<=[a-z0-9+.-])(:/{1,2})(?!/)(?:[^\s/?#:]{0,4000}:\S{0,4000}|[^\s/?#]{0,4000})@")
_CODED_LOGIN = re.compile(r"(?i)(%3a%2f%2f)(?:(?!%2f)[^\s&]){0,4000}%40")
_NAME = re.compile(r"[?&;#]([\w.%~+-]+)=")
_VALUE = re.compile(r"[^&\s]*[^&\s'\":,.;)\]}>]")
_WORDS = "password|passwd|pwd|token|secret|signature|credential"
_KEYS = "(?:access|account|private|shared|subscription)key"
_SECRET = re.compile(
    rf"(?i).*(?:{_WORDS}).*|(?:.*[^a-z0-9])?(?:key|apikey|sig|auth|authorization|code|pass|passphrase|jwt|{_KEYS})"
)


def without_secrets(text: str) -> str:
    """Return a text with *** in place of the user names, passwords and tokens of the addresses in it."""
    text = _CODED_LOGIN.sub(r"\1***%40", _LOGIN.sub(r"\1***@", text))
    parts, end = [], 0
    for name in _NAME.finditer(text):
        if name.start() >= end and _SECRET.fullmatch(unquote(name[1])) and (value := _VALUE.match(text, name.end())):
            parts += [text[end : name.end()], "***"]
            end = value.end()
    return "".join([*parts, text[end:]])
