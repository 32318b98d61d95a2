"""Dates as people write them in English, at random, with what they mean.

What could be read in two ways means one thing here:

    5/3/98, 5-3-98       month, day, year: as in the United States
    3.5.98               day, month, year: as in most of Europe, where people write dots
    1998/5/3, 1998-5-3   a year of four digits that comes first is followed by month and day
    98                   1998; two digits from 50 are of the 1900s, those below 50 of the 2000s

A date may be in no calendar, such as 31 February: it means those numbers all the same, and it is
for the reader to look into a calendar. Weekdays say nothing. There are also texts that are no
dates.
"""

import datetime
import random
from typing import NamedTuple

from attn_engine.demo.dates import ALPHABET, NO_DATE

TWO_DIGITS = range(1950, 2050)  # years that two digits can mean
FOUR_DIGITS = range(1000, 10000)
HELD_OUT = 10  # each tenth day of the calendar is kept from training
IMPOSSIBLE, NOT_DATES = 0.04, 0.12  # shares of the training: dates in no calendar; other texts

MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
ORDINALS = (
    *("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth"),
    *("tenth", "eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth"),
    *("seventeenth", "eighteenth", "nineteenth", "twentieth"),
    *("twenty-first", "twenty-second", "twenty-third", "twenty-fourth", "twenty-fifth"),
    *("twenty-sixth", "twenty-seventh", "twenty-eighth", "twenty-ninth", "thirtieth"),
    "thirty-first",
)

NUMBERS = (
    *(
        "{m}/{d}/{y}",
        "{m}/{d}/{y}",
        "{m} / {d} / {y}",
        "{m}-{d}-{y}",
        "{d}.{m}.{y}",
        "{d}. {m}. {y}",
    ),
    *("{Y}-{m}-{d}", "{Y}/{m}/{d}", "{Y}.{m}.{d}", "{Y}{mm}{dd}"),
)
WORDS = (
    *("{d} {month} {year}", "{d} {month}, {year}", "{d}-{month}-{y}", "{d}. {month} {year}"),
    *("{nth} {month} {year}", "{nth} {month}, {year}", "{nth} of {month} {year}"),
    *("{nth} of {month}, {year}", "the {nth} of {month} {year}", "the {nth} of {month}, {year}"),
    *("{month} {d} {year}", "{month} {d}, {year}", "{month} {d},{year}", "{month}-{d}-{y}"),
    *("{month} {nth} {year}", "{month} {nth}, {year}", "{month} the {nth}, {year}"),
    *("{Y} {month} {d}", "{Y}, {month} {nth}", "{Y}-{month}-{d}", "{dd}{month}{y}"),
)
PARTS = (  # which lack something
    *("{d} {month}", "{month} {nth}", "the {nth} of {month}", "{nth}", "{month}", "{month} {year}"),
    *("{m}/{d}", "{m}-{d}", "{d}.{m}.", "{Y}-{m}", "{m}/{y}", "{year}", "{d}", "{weekday}"),
    *("{weekday} {d}", "{weekday}, {month} {d}", "{weekday} the {nth}", "{d} {year}"),
)


class Day(NamedTuple):
    """A day, which need not be in the calendar."""

    year: int
    month: int
    day: int

    @property
    def iso(self) -> str:
        """YYYY-MM-DD."""
        return f"{self.year:04}-{self.month:02}-{self.day:02}"


def dates(rng: random.Random, n: int, *, held_out: bool) -> list[tuple[str, str]]:
    """Pairs (text, ISO date) of days that exist; of those kept from training, or of others."""
    days = [real_day(rng, held_out) for _ in range(n)]
    return [(write(day, rng), day.iso) for day in days]


def impossible_dates(rng: random.Random, n: int) -> list[tuple[str, str]]:
    """Pairs of days in no calendar."""
    days = [impossible_day(rng) for _ in range(n)]
    return [(write(day, rng), day.iso) for day in days]


def other_texts(rng: random.Random, n: int) -> list[tuple[str, str]]:
    """Pairs (text, NO_DATE)."""
    kinds = (part_of_a_date, odd_part, words, scribble)
    return [(rng.choice(kinds)(rng), NO_DATE) for _ in range(n)]


def training_texts(rng: random.Random, n: int) -> list[tuple[str, str]]:
    """Pairs of all kinds, in any order; no day is held out."""
    impossible, others = round(IMPOSSIBLE * n), round(NOT_DATES * n)
    pairs = dates(rng, n - impossible - others, held_out=False)
    pairs += impossible_dates(rng, impossible) + other_texts(rng, others)
    rng.shuffle(pairs)
    return pairs


def real_day(rng: random.Random, held_out: bool) -> Day:
    """A day of the calendar; most are of the years that two digits can mean."""
    while True:
        years = TWO_DIGITS if rng.random() < 2 / 3 else FOUR_DIGITS
        first = datetime.date(years[0], 1, 1).toordinal()
        last = datetime.date(years[-1], 12, 31).toordinal()
        ordinal = rng.randint(first, last)
        if (ordinal % HELD_OUT == 0) == held_out:
            return Day(*datetime.date.fromordinal(ordinal).timetuple()[:3])


def impossible_day(rng: random.Random) -> Day:
    """A day too many for its month, or a month too many: day and month exchanged, it may be."""
    month, day = rng.choice(
        [
            (2, rng.choice([30, 31])),
            (rng.choice([4, 6, 9, 11]), 31),
            (rng.randint(1, 12), rng.randint(32, 99)),
            (rng.randint(13, 31), rng.randint(1, 31)),
        ]
    )
    return Day(rng.choice(TWO_DIGITS), month, day)


def write(day: Day, rng: random.Random) -> str:
    """The day in one of the forms."""
    return fill_a_form(fields_of(day, rng), rng)


def fill_a_form(fields: dict[str, str], rng: random.Random) -> str:
    """Numbers, or words where the month has a name."""
    if "month" not in fields or rng.random() < 0.35:
        return rng.choice(NUMBERS).format(**fields)
    text = rng.choice(WORDS).format(**fields)
    if rng.random() < 0.25:
        text = f"{fields['weekday']}{rng.choice([', ', ' '])}{text}"
    if rng.random() < 0.05:
        text = text.replace(" ", "  ") + "."
    return any_case(text, rng)


def fields_of(day: Day, rng: random.Random) -> dict[str, str]:
    """What the forms are filled with."""
    short = f"{day.year % 100:02}" if day.year in TWO_DIGITS and rng.random() < 0.5 else ""
    fields = {
        "d": rng.choice([f"{day.day}", f"{day.day:02}"]),
        "m": rng.choice([f"{day.month}", f"{day.month:02}"]),
        "dd": f"{day.day:02}",
        "mm": f"{day.month:02}",
        "y": short or f"{day.year}",
        "Y": f"{day.year}",
        "year": rng.choice([short, short, f"'{short}"]) if short else f"{day.year}",
        "nth": rng.choice([nth(day.day), nth(day.day), *ORDINALS[day.day - 1 : day.day]]),
        "weekday": weekday(day, rng),
    }
    if day.month <= len(MONTHS):
        month = MONTHS[day.month - 1]
        shorter = "Sept" if month == "September" and rng.random() < 0.5 else month[:3]
        fields["month"] = rng.choice([month, month, shorter, shorter + "."])
    return fields


def part_of_a_date(rng: random.Random) -> str:
    """A date that lacks something."""
    return any_case(rng.choice(PARTS).format(**fields_of(real_day(rng, held_out=False), rng)), rng)


def odd_part(rng: random.Random) -> str:
    """A date whose month is no word, or whose year has three digits, five, or a zero before it."""
    fields = fields_of(real_day(rng, held_out=False), rng)
    if rng.random() < 0.5:
        return any_case(rng.choice(WORDS).format(**fields | {"month": letters(rng, 3, 8)}), rng)
    digits = "".join(rng.choices("0123456789", k=3))
    year = rng.choice([digits, f"0{digits}", f"{rng.randint(10, 99)}{digits}"])
    return fill_a_form(fields | dict.fromkeys(("y", "Y", "year"), year), rng)


def words(rng: random.Random) -> str:
    """Words that are none, perhaps with a part of a date."""
    mixed = [letters(rng, 1, 7) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.5:
        mixed.insert(rng.randint(0, len(mixed)), part_of_a_date(rng))
    return any_case(" ".join(mixed), rng)


def letters(rng: random.Random, least: int, most: int) -> str:
    """So many letters, any of those that dates have."""
    return "".join(rng.choices(ALPHABET[ALPHABET.index("a") :], k=rng.randint(least, most)))


def scribble(rng: random.Random) -> str:
    """Any characters, or digits and signs alone."""
    characters = rng.choice([ALPHABET, ALPHABET[: ALPHABET.index("a")]])
    return rng.choice(characters.strip()) + "".join(rng.choices(characters, k=rng.randint(0, 20)))


def any_case(text: str, rng: random.Random) -> str:
    """The text, or all of it in small letters, or in large ones, or words that begin with them."""
    return rng.choice([str, str.lower, str.upper, str.title])(text)


def nth(number: int) -> str:
    """1st, 2nd, 3rd, 4th ..."""
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number in (11, 12, 13) else suffix}"


def weekday(day: Day, rng: random.Random) -> str:
    """The day's name or its first three letters; any name for a day that does not exist."""
    try:
        name = WEEKDAYS[datetime.date(*day).weekday()]
    except ValueError:
        name = rng.choice(WEEKDAYS)
    return rng.choice([name, name[:3]])
