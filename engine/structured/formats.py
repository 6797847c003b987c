"""The values of `format` that are enforced: what each one looks like, and how long it may be.

llguidance knows all of them within JSON, but takes there the whole of RFC 3339: the year 0000, 29 February of
any year, leap seconds and lower-case letters, all of which Python's `datetime` refuses, and digits without
end; and mail without a dot in its domain, which readers of mail addresses refuse. So these are written here,
and by these expressions wherever they stand.
"""

from __future__ import annotations

from collections.abc import Mapping

_DIGITS = "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTH = "(0[48]|[2468][048]|[13579][26])"  # 04, 08, ... 96: a leap year's last two digits, or its first two
_DATE = (
    f"({_YEAR}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
    f"|([0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
)
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
# Six digits of every unit together are fewer days than a `timedelta` may have.
_YEARS, _MONTHS, _WEEKS, _DAYS, _HOURS, _MINUTES, _SECONDS = (f"[0-9]{{1,6}}{unit}" for unit in "YMWDHMS")
_SPAN = f"({_YEARS}({_MONTHS}({_DAYS})?)?|{_MONTHS}({_DAYS})?|{_DAYS})"
_CLOCK = f"T({_HOURS}({_MINUTES}({_SECONDS})?)?|{_MINUTES}({_SECONDS})?|{_SECONDS})"

# What Python's email-validator and zod take: at most 64 characters before the @, and a dot in the domain.
_ATOM, _LABEL = "[A-Za-z0-9_+-]{1,20}", "[A-Za-z0-9]{1,20}(-[A-Za-z0-9]{1,20})?"
_EMAIL = f"{_ATOM}([.']{_ATOM}){{0,2}}@({_LABEL}\\.){{1,3}}[A-Za-z]{{2,12}}"

WRITTEN: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_SPAN}({_CLOCK})?|{_CLOCK}|{_WEEKS})",
    "email": _EMAIL,
}
"""Dates, times and durations, as RFC 3339 has them and Python reads them, and mail: regexes of the whole
text."""

IMPLIED: Mapping[str, frozenset[str]] = {
    "email": frozenset(
        {r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"}
    ),
    "duration": frozenset(
        {r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"}
    ),
}
"""Patterns that zod puts beside a format, and that look around: whatever is written here matches them."""

BARE: Mapping[str, str] = {
    **WRITTEN,
    "hostname": "[A-Za-z0-9]{1,30}(-[A-Za-z0-9]{1,30})?(\\.[A-Za-z0-9]{1,30}){0,3}",
    "ipv4": f"{_DIGITS}(\\.{_DIGITS}){{3}}",
    "ipv6": "[0-9a-f]{1,4}(:[0-9a-f]{1,4}){7}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "uri": "[a-z][a-z0-9+.-]*:\\/\\/[A-Za-z0-9.-]+(\\/[A-Za-z0-9._~-]*)*",
}
"""All formats where a text stands outside of JSON: the same, and the others as llguidance has them in JSON,
or narrower."""

FORMATS = frozenset(BARE)
"""The values of `format` that are enforced."""

LONGEST: Mapping[str, int] = {"hostname": 253, "uri": 2083}
"""Characters of those that would run on: what names may have, and what browsers took of a URL."""
