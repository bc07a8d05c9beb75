"""Fields of a CSV line: a plain number, an ISO 8601 date, or what is wrong with it."""

import re
from contextlib import suppress
from datetime import UTC, datetime

NUMBER_BYTES = b"0123456789+-.eE"
_THOUSANDS = re.compile(r"[+-]?[0-9]+([ '’_\u00a0\u2009\u202f][0-9]+)+(\.[0-9]*)?")
_DATE = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.0+)?)?(Z|[+-][0-9]{2}:[0-9]{2})?)?"
)
_EPOCH = datetime(1970, 1, 1)
_EPOCH_UTC = datetime(1970, 1, 1, tzinfo=UTC)


def number_of(text: str) -> float:
    """Read a plain decimal number, or say what it is instead."""
    if not text.encode().translate(None, NUMBER_BYTES):
        with suppress(ValueError):
            return float(text)
    bare = text.strip().lower().lstrip("+-")
    if bare in ("nan", "inf", "infinity"):
        raise ValueError("is not a finite number")
    if "," in text:
        raise ValueError(
            "has a comma: write the number without thousands separators and with a decimal point"
        )
    if _THOUSANDS.fullmatch(text):
        raise ValueError("has a thousands separator: write the digits without it")
    if text != text.strip():
        raise ValueError("has blanks around it")
    raise ValueError("is not a number")


def seconds_of(text: str) -> int:
    """Read an ISO 8601 date as epoch seconds."""
    if not _DATE.fullmatch(text):
        raise ValueError("is not an ISO 8601 date in whole seconds, such as 2020-01-31T15:30:00Z")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"is not a date of the calendar ({error})") from None
    since = moment - (_EPOCH if moment.tzinfo is None else _EPOCH_UTC)
    return since.days * 86_400 + since.seconds


def quoted(text: str) -> str:
    """Quote a value of the file, cut to a length that fits in a message."""
    return repr(text) if len(text) <= 40 else repr(text[:40]) + "..."
