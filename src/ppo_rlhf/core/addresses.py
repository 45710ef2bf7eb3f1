"""Hide the passwords and tokens of addresses in messages."""

import re

# A password may have a slash or another @. `hf://datasets/owner/name@revision` and other paths have an @, too. Paths of
# files lose a slash: `pathlib` writes http:/user:password@host
_LOGIN = re.compile(r"(?i)(?<![\w+.-])((?!hf:)[a-z][\w+.-]+:/{1,2})(?!/)(?:[^\s/?#:]*:\S*|[^\s/?#]*)@")
_WORDS = r"[\w.%~-]*(?:password|passwd|pwd|token|secret|signature|credential)[\w.%~-]*"
_NAMES = r"(?:[\w.%~-]*[_.-])?(?:key|apikey|sig|auth|authorization)"
_QUERY = re.compile(rf"(?i)([?&;#](?:{_WORDS}|{_NAMES})=)[^&\s]*[^&\s'\":,.;)\]}}>]")


def without_secrets(text: str) -> str:
    """Return a text with *** in place of the user names, passwords and tokens of the addresses in it."""
    return _QUERY.sub(r"\1***", _LOGIN.sub(r"\1***@", text))
