"""Hide the passwords and tokens of addresses in messages."""

import re

# A password may have a slash or another @. `hf://datasets/owner/name@revision` and other paths have an @, too. Paths of
# files lose a slash: `pathlib` writes http:/user:password@host. Whatever stands before a scheme may be glued to it
_LOGIN = re.compile(r"(?i)((?!h?f:)[a-z][a-z0-9+.-]*:/{1,2})(?!/)(?:[^\s/?#:]*:\S*|[^\s/?#]*)@")
_WORDS = r"[\w.%~-]*(?:password|passwd|pwd|token|secret|signature|credential)[\w.%~-]*"
_KEYS = "(?:access|account|private|shared|subscription)key"
_NAMES = rf"(?:[\w.%~-]*[_.-])?(?:key|apikey|sig|auth|authorization|code|pass|passphrase|jwt|{_KEYS})"
_QUERY = re.compile(rf"(?i)([?&;#](?:{_WORDS}|{_NAMES})=)[^&\s]*[^&\s'\":,.;)\]}}>]")


def without_secrets(text: str) -> str:
    """Return a text with *** in place of the user names, passwords and tokens of the addresses in it."""
    return _QUERY.sub(r"\1***", _LOGIN.sub(r"\1***@", text))
