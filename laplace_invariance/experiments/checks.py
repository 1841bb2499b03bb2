"""Configurations that check themselves: their base class, and checks that they share.

Like :mod:`.options` this imports neither torch nor numpy.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

__all__ = [
    "Config",
    "check_not_negative",
    "check_positive",
    "check_ranges",
    "choices_of",
    "normalised",
]


WIDEST = 10.0  # of ranges: beyond it, numbers of transformed images overflow
MOST_BITS = 63  # of whole numbers in torch
LARGEST = 3.4e38  # number in single precision


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base class of all configurations.

    It checks every field against the choices of its type, where hyphens may stand for
    underscores, and makes tuples of lists, as JSON has them. Metadata of a field may give its
    ``option`` on the command line, the ``meanings`` of its choices, ``positional=True``,
    ``degrees=True``: a number that may be written in degrees, or ``identity=False``: a field in
    which two runs of one experiment may differ.

    Attributes:
        format: Number of the recipe and the files of an experiment, raised whenever results of
            before cannot be continued or compared with new ones.

    Raises:
        ValueError: If a value is not among its choices, or out of its range.
    """

    format: ClassVar[int] = 1

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, list):
                value = tuple(value)
            self._set(entry.name, self._checked(entry.name, value, hints[entry.name]))

    def _checked(self, name: str, value: Any, hint: Any) -> Any:
        choices = choices_of(hint)
        if value is None and type(None) in get_args(hint):
            return value
        if get_origin(hint) is Mapping:  # whose ranges are checked by who knows what they are
            return value
        if not choices:
            return checked_number(name, value, hint)
        if get_origin(hint) is tuple:
            values = tuple(normalised(one, choices) for one in value)
            check_choices(name, values, choices)
            return values
        if isinstance(value, tuple):  # a field that takes one of its choices or something else
            return value
        value = normalised(value, choices)
        check_choice(name, value, choices)
        return value

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the one place where a frozen field is normalised


def checked_number(name: str, value: Any, hint: Any) -> Any:
    """Return the value of a field; raise ValueError if it is not the number that its type wants.

    Args:
        name: Name of the field.
        value: Number, or several in a tuple; anything else if the type wants no number.
        hint: Type of the field.
    """
    if isinstance(value, tuple):
        return tuple(checked_number(name, one, hint) for one in value)
    wanted = (hint, *get_args(hint))
    if int in wanted:
        try:
            value = operator.index(value)
        except TypeError:
            raise ValueError(f"{name} must be a whole number, got {value!r}") from None
        if value.bit_length() > MOST_BITS:
            raise ValueError(f"{name} must have at most {MOST_BITS} bits, got {value}")
    elif float in wanted:
        if not isinstance(value, int | float):
            raise ValueError(f"{name} must be a number, got {value!r}")
        if LARGEST < abs(value) < math.inf:
            raise ValueError(f"{name} must be at most {LARGEST}, got {value}")
    return value


def choices_of(hint: Any) -> tuple[str, ...]:
    """Return the values that a type hint allows by a ``Literal`` in it; none if it has none."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    for part in get_args(hint):
        found = choices_of(part)
        if found:
            return found
    return ()


def normalised(value: str, choices: tuple[str, ...]) -> str:
    """Return the choice that a value spells, with hyphens and underscores alike, or the value."""
    by_spelling = {choice.replace("-", "_"): choice for choice in choices}
    return by_spelling.get(str(value).replace("-", "_"), value)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; choose from {', '.join(choices)}")


def check_choices(name: str, values: tuple[str, ...], choices: tuple[str, ...]) -> None:
    """Raise ValueError unless there are values and all of them are among the choices."""
    unknown = [value for value in values if value not in choices]
    if unknown or not values:
        raise ValueError(f"{name} must be some of {', '.join(choices)}, got {unknown or 'none'}")


def check_positive(config: Config, *names: str) -> None:
    """Raise ValueError unless the named fields are positive and finite, or None."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")


def check_not_negative(config: Config, *names: str) -> None:
    """Raise ValueError unless the named fields are finite and not negative."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {value}")


def check_ranges(field_name: str, ranges: Mapping[str, float]) -> None:
    """Raise ValueError if a range is not finite and positive, or too wide to be meant.

    Args:
        field_name: What the ranges are, for the message.
        ranges: Widths by name; the names are checked by who knows them.
    """
    for name, width in ranges.items():
        if not 0 <= width < math.inf:
            raise ValueError(f"{field_name}: {name} must be finite and not negative, got {width}")
        if name == "rotation" and width > math.pi * (1 + 1e-6):  # but for round-off
            raise ValueError(_too_far(field_name, width))
        if width > WIDEST:
            raise ValueError(
                f"{field_name}: {name} must be at most {WIDEST:g}, got {width:.4g}; translations "
                "are in half-widths of the image, scales are logarithms of factors"
            )


def _too_far(field_name: str, rotation: float) -> str:
    """Return why a rotation is refused, and what to write if it is in degrees."""
    found = f"got {rotation:.4g} ({math.degrees(rotation):.4g} degrees)"
    words = f"{field_name}: rotation must be at most pi (180 degrees), all rotations, {found}"
    if rotation <= 2 * math.pi:
        return words
    return f"{words}; degrees are written rotation={rotation:g}deg, math.radians in Python"
