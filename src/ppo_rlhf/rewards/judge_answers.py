"""What the answer of a language model that judges says: one score, or one verdict.

An answer that does not plainly say one number or one verdict says nothing (None): a misread score would train the
policy. docs/rewards.md lists the forms that are read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

LONGEST = 1_000_000
"""Maximum length in characters of an answer that is read; nothing is read in a longer answer."""

# A claim is what one place of an answer says: [8.0], [None] if the place says something else than one plain number or
# verdict, or [] if it says nothing
Claims = list[float | None]

_THOUGHTS = re.compile(r"[<\[](/?)(?:think|thinking|thought|reasoning)[>\]]", re.IGNORECASE)
_ECHO = re.compile(r"<(/?)(?:request|response|response_a|response_b)>", re.IGNORECASE)
_VERDICTS_OF_THE_TEMPLATE = re.compile(r"verdict: A\s*\n\s*verdict: B\s*\n\s*verdict: tie", re.IGNORECASE)
_PLAIN_SIGNS = {0xFF01 + place: 0x21 + place for place in range(94)}  # full-width letters, digits and signs
_PLAIN_SIGNS |= dict.fromkeys((0x2212, 0xFE63), 0x2D) | {0x3000: 0x20, 0x3002: 0x2E}  # minus signs, space, full stop
_INVISIBLE = dict.fromkeys((0x200B, 0x200C, 0x200D, 0x200E, 0x200F, 0x2060, 0xFEFF, 0xFE0F), None)
_INVISIBLE |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], None)  # direction of writing
_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)\n?[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_QUOTED = re.compile(
    r"^[ \t]*>.*|`[^`\n]*`|“[^“”]*”|„[^„“”]*[“”]|«[^«»]*»|‘[^‘’]*’|「[^「」]*」|『[^『』]*』|(?<!\w)'[^'\n]*'(?!\w)",
    re.MULTILINE,
)
_WRAPPED = re.compile(
    r"<(answer|final|final_answer|output|result|evaluation|judgement|judgment|b|strong|i|em|u|p)>([^<>]*)</\1>",
    re.IGNORECASE,
)
_WHOLE = re.compile(r"```[^\n`]*\n(.*?)\n?[ \t]*```|`([^`\n]*)`|\"([^\"\n]*)\"|“([^“”\n]*)”", re.DOTALL)
"""An answer that is wholly a code block, or wholly in quotation marks."""
_SENTENCE_END = re.compile(r"(?<=[.!?;])[\"”’)\]*_]*\s+")
_LEAD = re.compile(
    r"[\W_]*(?:\d+\)\s+)?[\W_]*(?:(?:in )?(?:final |my )?"
    r"(?:answer|conclusion|result|judgement|judgment|evaluation|summary|decision|output)[*_ ]*[:–—-][\W_]*)?"
    r"(?:(?:so|thus|hence|therefore|however|but|and|now|actually|the|this|my|our|final|overall|total|response's)[\W_]+)*",
    re.IGNORECASE,
)
"""What may stand between the beginning of a line or sentence and the word `score` or `verdict`."""
_AFTER = re.compile(
    r"(?P<marks>[*_`\"'”’ \t]*)(?:(?:for|of) (?:the|this) (?:response|answer|reply)\b[*_ \t]*)?"
    r"(?P<note>[(\[][^()\[\]\n]*[)\]])?[*_`\"'”’ \t]*"
    r"(?P<sign>(?:is\b[ \t]*:?)|[:=]+>?|\|+|→|-+>|[-–—]+(?=[*_ \t])|\.{2,}|…|)[*_]*(?P<value>.*)",
    re.IGNORECASE,
)
_NUMBER = r"[+-]?(?:\d+(?:[.,]\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
_NOTE = r"(?:\s*\([^()\d]*\))?"
_FROM_TO = re.compile(
    rf"(?:\b(?:on|in|from|using)\s+)?(?:\b(?:an?|the)\s+)?(?:\b(?:scale|range)\b[\s:]*)?(?:\b(?:of|from)\s+)?"
    rf"(?<![\w.,])({_NUMBER}){_NOTE}\s*(?:[-–—]+|\bto\b|\bthrough\b|\.{{2,}}|…)\s*({_NUMBER}){_NOTE}(?:\s+scale\b)?",
    re.IGNORECASE,
)
_OUT_OF = re.compile(
    rf"(?:/|\bout\s+of\b|\bof\b)\s*(?:an?\s+)?(?:(?:possible|maximum)\s+(?:of\s+)?)?({_NUMBER})(?:\s*(?:points?|pts?)\b)?",
    re.IGNORECASE,
)
_OF_THE_SCALE = re.compile(r"max|scale|range|out.?of|winner", re.IGNORECASE)
"""Names of a JSON object's fields that say what its score or verdict means."""
_SCALE_BELOW = re.compile(r"\n[ \t]*(?=[(\[]?(?:/|out\s+of\b)\s*\d)", re.IGNORECASE)
"""The end of a line above a line that begins with the scale's maximum."""
_CLOSING = {"[": "]", "(": ")", "{": "}", "<": ">", '"': '"', "'": "'", "“": "”", "‘": "’"}
_END = re.compile(r"[\s.,;:!|)\]}]*(?:(?<=\s)[✅✔⭐🌟🏆👍🎉\ufffd\s]+)?")
"""Signs that change nothing behind a score or verdict: punctuation, and some emoji behind a space."""
_BREAK = re.compile(r"[)\]}|\s]*(?:[.;:!,(\[|]|[–—]|-\s|\b(?:because|since|due to)\b)", re.IGNORECASE)
_NUMBER_WORD = r"(?:zero|one(?!\s+of\b)|two|three|four|five|six|seven|eight|nine|ten)\b"
_REVISED = re.compile(
    r"^[\W_]*(?:or|to|if|unless|assuming|provided|minus|plus|maybe|perhaps|possibly|at most|at least|half)\b"
    r"|\b(?:wait|correction|scratch that|second thoughts?|reflection|not really|chang\w+ my mind|never mind|no,)"
    r"|\b(?:take|taking|strike|disregard|ignore) (?:that|it|this)\b|\b(?:that|this|it)(?:['’]s| is| was| seems) too\b"
    r"|\b(?:half a|and a half|per\s?cent|pct)\b"
    rf"|\b(?:or|to|from|be|it|is|a|an|maybe|perhaps|rather|actually|not|no|mean|instead|say)[\W_]+{_NUMBER_WORD}",
    re.IGNORECASE,
)
"""Words of a remark that take back or change what stands before the remark."""
_NO_SCORE = re.compile(rf"\bn\s?/\s?a\b|\bnone\b|\bunknown\b|\bundecided\b|\b{_NUMBER_WORD}", re.IGNORECASE)
_RULE = re.compile(r"[\s|:+=-]*[-=][\s|:+=-]*")
_TIE = re.compile(
    r"(?:(?:it'?s|it is|this is) )?(?:an? )?(?:clear |complete )?(?:tied?|draw)\b(?!-\w)(?P<rest>.*)"
    r"|both(?: (?:responses |answers )?are (?:equal|equally good|the same|tied))?(?P<end>[\W_]*)",
    re.IGNORECASE,
)
_NO_TIE = re.compile(
    r"\?|%|\b(?:better|winner|wins|prefer\w*|lean\w*|edge|stronger|not|if|unless|but|or|wait|correction)\b|n't",
    re.IGNORECASE,
)
_KIND = r"(?:response|assistant|answer|option|model|candidate)"
_WINNER = re.compile(
    rf"(?:(?i:(?:the )?(?:winner|(?:better|best|winning|stronger|preferred) (?:{_KIND}|one)) ?(?:is|:)) ?)?"
    rf"(?:(?i:{_KIND}) )?(?P<letter>[AB]|[ab](?=[\W_]*$))(?!\w)(?P<rest>.*)",
)
_WINS = re.compile(
    rf"\s*(?:>+(?= ?(?:{_KIND} )?[AB])|(?:is|was)(?: (?:the|clearly|much|slightly|far|marginally|significantly|a|bit))*"
    rf" (?:better|best|superior|preferred|preferable|stronger|winner)\b(?: (?:{_KIND}|one)\b)?|wins\b)"
    rf"(?:(?: (?:than|over|against))? ?(?:(?:the )?{_KIND} )?(?P<loser>[AB])\b)?",
)
_OPTIONS = re.compile(r"[\W_]*A\W+(?:or\W+)?B\W+(?:or\W+)?(?:an?\W+)?tie[\W_]*", re.IGNORECASE)
_UNSURE = re.compile(r"\?|\b(?:tied?|draw|both|neither|unsure|not sure|actually|instead)\b", re.IGNORECASE)


@dataclass(frozen=True)
class _Form:
    """The form of a score or of a verdict in an answer."""

    label: str
    """The word before the score or verdict."""
    claims: Callable[[str, str, bool], Claims]
    """Returns the claims of a value, from the value, the sign between label and value, and whether the value must
    stand alone: without a remark behind it."""
    fits: Callable[[str], bool]
    """Returns whether a note in brackets between label and value, such as `(1-10)`, leaves the value's meaning."""


def read_score(answer: str, lowest: float, highest: float) -> float | None:
    """Return the score from `lowest` to `highest` that an answer plainly says, or None."""
    scale = lowest, highest
    form = _Form(
        "score",
        lambda value, sign, is_alone: _score_claims(value, sign, scale, is_alone=is_alone),
        lambda note: not re.search(r"(?!final|overall|total)\b\w", _without_scale(note, scale), re.IGNORECASE),
    )
    score = _only(_claims(answer, form))
    return score if score is not None and lowest <= score <= highest else None


def read_verdict(answer: str) -> float | None:
    """Return 1 if an answer plainly names A, 0 if B, ½ for a tie, else None."""
    form = _Form(
        "verdict",
        lambda value, sign, is_alone: _verdict_claims(value, sign, is_alone=is_alone),
        lambda note: re.search(r"\bA\b.*\bB\b", note) is not None,
    )
    return _only(_claims(answer, form))


def read_match(answer: str, pattern: re.Pattern[str], read: Callable[[str], float | None]) -> float | None:
    """Return what the last match of a user's pattern says, outside of the model's thoughts."""
    matches = pattern.findall(_without_thoughts(answer)) if len(answer) <= LONGEST else []
    return read(matches[-1]) if matches else None


def plain_number(text: str) -> float | None:
    """Return the finite number that a text is; None if the text is no number, or if a comma may group thousands."""
    text = text.translate(_PLAIN_SIGNS).strip()
    if not re.fullmatch(_NUMBER, text) or re.fullmatch(r"[+-]?[^\W0]\d{0,2},\d{3}", text):
        return None
    number = float(text.replace(",", "."))
    return number if math.isfinite(number) else None


def plain_verdict(text: str) -> float | None:
    """Return 1 for A, 0 for B and ½ for tie, in any case; None for another text."""
    return {"A": 1.0, "B": 0.0, "TIE": 0.5}.get(text.translate(_PLAIN_SIGNS).strip().upper())


def _only(claims: Claims) -> float | None:
    """Return what all claims say; None if they differ, or if there is none."""
    return claims[-1] if claims and all(claim == claims[-1] for claim in claims) else None


def _claims(answer: str, form: _Form) -> Claims:
    """Return what the places of an answer with the form's label say, in order, without quoted places."""
    if len(answer) > LONGEST:
        return []
    text = _without_thoughts(answer).translate(_PLAIN_SIGNS).translate(_INVISIBLE).replace("__", "**")
    text = _VERDICTS_OF_THE_TEMPLATE.sub("", _without_echo(text)).strip()
    if whole := _WHOLE.fullmatch(text):
        text = next(part for part in whole.groups() if part is not None).strip()
    found, text = _claims_of_record(text, form)
    found = found + _claims_of_lines(_FENCED.sub("", text), form)
    fences = list(_FENCED.finditer(text))
    if not found and fences and not text[fences[-1].end() :].strip():
        # The answer ends in a code block, and has the form nowhere else
        found = _claims_of_lines(fences[-1][1], form)
    return found


def _without_thoughts(text: str) -> str:
    """Return a text without the model's thoughts. A chat template may have written `<think>` into the prompt, so all
    text before a lone `</think>` is a thought, and so is all text behind a lone `<think>`.
    """
    kept: list[str] = []
    end, is_open = 0, False
    for tag in _THOUGHTS.finditer(text):
        if tag[1] and not is_open:
            kept = []
        elif not tag[1] and not is_open:
            kept.append(text[end : tag.start()])
        end, is_open = tag.end(), not tag[1]
    return "".join(kept) + ("" if is_open else text[end:])


def _without_echo(text: str) -> str:
    """Return a text without what stands between the tags of the request, which a model may repeat."""
    kept: list[str] = []
    end, opened = 0, None
    for tag in _ECHO.finditer(text):
        if not tag[1] and opened is None:
            opened = tag.start()
        elif tag[1] and opened is not None:
            kept.append(text[end:opened])
            end, opened = tag.end(), None
    return "".join(kept) + text[end:]


def _without_quotes(text: str, label: str) -> str:
    """Return a text without quotations that contain the label and a word behind the label."""
    says = re.compile(rf"(?<!\w){label}\W+\w", re.IGNORECASE)
    # If quotation marks come in pairs, a quotation may have several lines
    straight = '"[^"]*"' if text.count('"') % 2 == 0 else '"[^"\n]*"'
    for quotation in (straight, _QUOTED):
        text = re.sub(quotation, lambda span: " " if says.search(span[0]) else span[0], text)
    return text


def _claims_of_record(text: str, form: _Form) -> tuple[Claims, str]:
    """Return what the field with the form's label says in the answer's JSON object, and the text without the object.

    The object must begin or end the answer, apart from the marks of a code block.
    """
    start, end = text.find("{"), text.rfind("}") + 1
    if (fence := _FENCED.search(text)) and fence[1].strip().startswith("{"):
        start, end = fence.span(1)
    before, after = text[: max(start, 0)], text[end:]
    is_at_edge = not before.strip("`json \n[") or not after.strip("` \n].")
    if not 0 <= start < end or not is_at_edge:
        return [], text
    try:
        fields = json.loads(text[start:end], object_pairs_hook=list, strict=False)
    except (ValueError, RecursionError):
        return [], text
    found: Claims = []
    for name, value in fields:
        if _OF_THE_SCALE.search(name) and not form.fits(f"/{value}"):
            found.append(None)
        if name.strip().lower() == form.label:
            is_text = isinstance(value, str)
            if is_text or (isinstance(value, int | float) and not isinstance(value, bool)):
                found += form.claims(value if is_text else repr(value), ":", True) or [None]
            else:
                found.append(None)
    return found, f"{before}\n{after}"


def _claims_of_lines(text: str, form: _Form) -> Claims:
    """Return what lines and sentences that begin with the form's label say."""
    for _ in range(2):  # an element within an element
        text = _WRAPPED.sub(r"\2", text)
    label = form.label
    element = re.compile(rf"<{label}>\s*([^<>]*?)\s*</{label}>([ \t]*(?:/|\(?(?:out )?of\b)[^\n]*)?", re.IGNORECASE)
    text = element.sub(rf"\n{label}: \1\2\n", text)
    text = _without_quotes(_SCALE_BELOW.sub(" ", text), label)
    word = re.compile(rf"(?<!\w){label}(?!\w)", re.IGNORECASE)
    has_several_records = text.count("{") > 1
    lines = text.split("\n")
    found: Claims = []
    for number, line in enumerate(lines):
        places = [(place, begin) for place in word.finditer(line) if (begin := _begin(line, place.start())) is not None]
        ends = [begin for _, begin in places[1:]] + [len(line)]
        for (place, _), end in zip(places, ends, strict=False):
            if (after := _AFTER.match(line, place.end(), max(end, place.end()))) is None:
                continue
            value, note = after["value"].strip("*_` \t|"), after["note"]
            fits = not note or form.fits(note)
            if re.search("[\"']", after["marks"]) and has_several_records:
                found.append(None)
            elif not value and not fits:
                found += form.claims(note, ":", False)
            elif not value and len(places) == 1:
                found += _claims_of_next_line(lines[number + 1 : number + 6], form)
            elif fits:
                found += form.claims(value, after["sign"].strip().lower(), False)
            elif re.search(r"\d", note):
                found.append(None)
    return found


def _begin(line: str, place: int) -> int | None:
    """Return where the line or sentence begins that has its label at `place`; None if other words lead to the label."""
    lead = _SENTENCE_END.split(line[max(0, place - 200) : place])[-1]
    return place - len(lead) if _LEAD.fullmatch(lead) else None


def _claims_of_next_line(lines: list[str], form: _Form) -> Claims:
    """Return the claim of the line below a heading or a table's head, if the line is a plain score or verdict."""
    for line in lines:
        if line.strip() and not _RULE.fullmatch(line):
            claims = form.claims(line.strip("*_` \t|#"), ":", True)
            return [] if None in claims else claims
    return []


def _unbracketed(value: str) -> str | None:
    """Return a value without emphasis and without the brackets and quotation marks that it begins with; None if they
    do not end.
    """
    value = " ".join(re.sub(r"[*_`]", " ", value).split())
    inner = value.lstrip("".join(_CLOSING) + " ")
    for mark in value[: len(value) - len(inner)].replace(" ", ""):
        if _CLOSING[mark] not in inner:
            return None
        inner = inner.replace(_CLOSING[mark], " ", 1)
    return inner


def _is_scale(found: re.Match[str], scale: tuple[float, float]) -> bool:
    return tuple(plain_number(number) for number in found.groups()) == scale[-len(found.groups()) :]


def _without_scale(text: str, scale: tuple[float, float]) -> str:
    """Return a text without the words that state the scale, such as `/10` or `(on a scale from 1 to 10)`."""
    for statement in (_FROM_TO, _OUT_OF):
        text = statement.sub(lambda found: " " if _is_scale(found, scale) else found[0], text, count=1)
    return re.sub(r"[(\[]\s*[)\]]", " ", text)


def _score_claims(value: str, sign: str, scale: tuple[float, float], *, is_alone: bool) -> Claims:
    """Return the claim of the text behind the word `score`: one number, and perhaps the scale and a remark."""
    text = " ".join(re.sub(r"[*_`]", " ", value).split())
    for statement in (_FROM_TO, _OUT_OF):
        found = statement.match(text)
        if found and _is_scale(found, scale) and (sign_behind := re.match(r"\s*[:=]\s*(?=\S)", text[found.end() :])):
            text = text[found.end() + sign_behind.end() :]
    inner = _unbracketed(text)
    if inner is None:
        return [None]
    number = re.match(_NUMBER, inner)
    outside = _without_scale(inner, scale)
    is_number = _has_numerals(outside) or _NO_SCORE.search(outside) is not None
    if number is None or not _has_numerals(outside):
        return [None] if is_number and sign not in ("", "is", "is:") else []
    score = plain_number(number[0])
    rest = inner[number.end() :]
    if score is None or re.match(r"\w", rest):
        return [None]
    if scale[1] >= 1000 and re.fullmatch(r"[+-]?[^\W0]\d{0,2}\.\d{3}", number[0]):  # the point may group thousands
        return [None]
    if sign.strip("-–—") == "" != sign and scale[0] <= -score:  # the dash may be a minus sign
        return [None]
    rest = _without_scale(re.sub(r"^\s*(?:points?|pts?)\b", " ", rest), scale)
    is_plain = _END.fullmatch(rest) is not None
    has_remark = not is_alone and not _has_numerals(rest) and not re.search("[?%]", rest)
    return [score] if is_plain or (has_remark and _is_remark(rest)) else [None]


def _has_numerals(text: str) -> bool:
    return any(sign.isnumeric() for sign in text)


def _is_remark(rest: str) -> bool:
    """Return whether a text behind a score or verdict is a remark that does not change what was said."""
    return _BREAK.match(rest) is not None and _REVISED.search(rest) is None


def _verdict_claims(value: str, sign: str, *, is_alone: bool) -> Claims:
    """Return the claim of the text behind the word `verdict`: A, B or a tie, and perhaps a remark."""
    if _OPTIONS.fullmatch(value):
        return []
    inner = _unbracketed(value)
    if inner is None:
        return [None]
    if tie := _TIE.fullmatch(inner):
        rest = tie["rest"] or tie["end"] or ""
        names_one = len(set(re.findall(r"\b[AB]\b", rest))) == 1
        is_plain = _END.fullmatch(rest) is not None
        return [0.5] if is_plain or not (is_alone or names_one or _NO_TIE.search(rest)) else [None]
    named = _WINNER.fullmatch(inner)
    if named is None:
        says = re.search(r"\b[AB]\b|\b(?i:tied?|draw|both|neither|none)\b", inner)
        return [None] if says and sign not in ("", "is", "is:") else []
    letter, rest = named["letter"].upper(), named["rest"]
    other = "B" if letter == "A" else "A"
    if (wins := _WINS.match(rest)) and wins["loser"] != letter:
        rest = rest[wins.end() :]
    rest = re.sub(rf"\bbetter than (?:the )?(?:(?i:{_KIND}) )?{other}\b", " ", rest)
    is_plain = _END.fullmatch(rest) is not None
    has_remark = not is_alone and sign != "" and not re.search(rf"\b{other}\b", rest) and not _UNSURE.search(rest)
    return [plain_verdict(letter)] if is_plain or (has_remark and _is_remark(rest)) else [None]
