"""Units of `{{convert}}`: symbol, names, size in base units, and the default unit to convert to.

`units.tsv` has one line per unit: kind, codes, symbol, singular, plural, factor, default output,
and an offset if there is one. Factors convert to metres, square metres, cubic metres, kilograms,
metres per second, joules, watts, pascals, kelvins (and so on); only units of one kind are converted
into each other. Metric prefixes, powers of ten (`e6acre`) and quotients (`kg/ha`) are not in the
table. Sources: NIST SP 811, appendix B, for factors; Module:Convert/documentation for defaults.
"""

import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple


class Unit(NamedTuple):
    """One unit of measure; `value * factor + offset` is the value in the base unit of its `kind`.

    For an inverse unit (L/100 km), the value in the base unit is 1 / (value * factor).
    """

    kind: str
    symbol: str
    singular: str
    plural: str
    factor: float
    default: str  # codes of the units to convert to by default
    offset: float = 0.0
    exponent: int = 0  # power of ten that is part of the factor, as in `e6acre`

    @property
    def is_inverse(self) -> bool:
        """Whether a larger value in this unit is a smaller quantity in the base unit."""
        return self.symbol == "L/100 km"

    def to_base(self, value: float) -> float:
        """Convert a value of this unit to the base unit of its kind."""
        return 1 / (value * self.factor) if self.is_inverse else value * self.factor + self.offset

    def from_base(self, value: float) -> float:
        """Convert a value of the base unit to this unit."""
        return 1 / (value * self.factor) if self.is_inverse else (value - self.offset) / self.factor


_TABLE = Path(__file__).with_suffix(".tsv")

# Units that have no symbol and are always written in full.
FULL_NAMES = frozenset(
    {"acre", "ton", "short ton", "long ton", "furlong", "fathom", "league", "carat"}
    | {"ton of TNT", "tonne of TNT", "kilotonne of TNT"}
)
# Kinds whose units are shown as symbols by default, where other units are shown by name.
SYMBOL_KINDS = frozenset({"temperature", "temperature difference"})

_PREFIXES = {
    "E": ("exa", 18), "P": ("peta", 15), "T": ("tera", 12), "G": ("giga", 9), "M": ("mega", 6), "k": ("kilo", 3),
    "h": ("hecto", 2), "da": ("deca", 1), "d": ("deci", -1), "c": ("centi", -2), "m": ("milli", -3),
    "μ": ("micro", -6), "µ": ("micro", -6), "n": ("nano", -9), "p": ("pico", -12), "f": ("femto", -15),
    "a": ("atto", -18),
}  # fmt: skip
_PREFIXED_CODES = ("m", "g", "L", "l", "J", "W", "Pa", "N", "Hz", "s", "pc", "ly", "eV", "K")
# default outputs of prefixed units, where the unit without prefix has a different default output
_PREFIXED_DEFAULTS = {
    "Gm": "mi", "Mm": "mi", "Tm": "mi", "hm": "ft", "dam": "ft", "dm": "in", "pm": "in", "fm": "in",
    "GJ": "kWh", "TJ": "kWh", "PJ": "kWh", "EJ": "kWh", "aJ": "eV",
    "cL": "impfloz USfloz", "dL": "impfloz USfloz", "cl": "impfloz USfloz", "dl": "impfloz USfloz",
    "kL": "cuft", "ML": "cuft", "GL": "cuft", "Mg": "LT ST", "ng": "gr", "ks": "h", "ms": "s",
    "e3km": "e3mi", "e3mi": "e3km", "e6km": "e6mi", "e6mi": "e6km", "e9km": "AU", "e9mi": "e9km",
    "e3acre": "km2", "e6acre": "km2", "e6ha": "e6acre", "e6km2": "e6sqmi", "e6sqmi": "e6km2",
    "e3m2": "e6sqft",
    "e3oilbbl": "e3m3", "e6oilbbl": "e3m3", "e9oilbbl": "e9m3", "e6cuft": "e6m3",
    "e9cuft": "e9m3", "e12cuft": "e12m3",
    "e3oilbbl/d": "e3m3/d", "e6oilbbl/d": "e3m3/d", "e6m2": "e6sqft", "e6L": "USgal", "e6carat": "t",
}  # fmt: skip
_SCALED = re.compile(r"e(3|6|9|12|15)(.+)")
_LARGE = re.compile(r"([kMGT])((?:oilbbl|cuft|USgal|impgal).*)")  # Moilbbl: million barrels
_MAX_CODE = 40  # characters


@lru_cache(1 << 10)
def find_unit(code: str) -> Unit:
    """Return the unit of a code, which may have a prefix or be a quotient: `e6acre`, `GJ`, `kg/ha`.

    >>> find_unit("e6acre").plural, find_unit("kg/ha").plural, find_unit("GL").singular
    ('acres', 'kilograms per hectare', 'gigalitre')

    Raises:
        KeyError: No unit has this code.
    """
    if code in UNITS:
        return UNITS[code]
    if len(code) > _MAX_CODE:
        raise KeyError(code)
    if (scaled_match := _SCALED.fullmatch(code)) and not _SCALED.match(scaled_match[2]):
        unit, exponent = find_unit(scaled_match[2]), int(scaled_match[1])
        default_target = _PREFIXED_DEFAULTS.get(code, unit.default)
        return unit._replace(factor=unit.factor * 10.0**exponent, default=default_target, exponent=exponent)
    if large_match := _LARGE.fullmatch(code):
        return find_unit(f"e{_PREFIXES[large_match[1]][1]}{large_match[2]}")
    dividend, slash, divisor = code.partition("/")
    if dividend and slash and "/" not in divisor:
        return _divide_units(find_unit(dividend), find_unit(divisor), divisor)
    return _add_prefix(code)


def _add_prefix(code: str) -> Unit:
    for prefix, (prefix_name, power) in _PREFIXES.items():
        if code.startswith(prefix) and (base_code := code.removeprefix(prefix)) in _PREFIXED_CODES:
            unit = UNITS[base_code]
            default = _PREFIXED_DEFAULTS.get(code, unit.default)
            symbol = code.replace("µ", "μ")
            return unit._replace(
                symbol=symbol,
                singular=prefix_name + unit.singular,
                plural=prefix_name + unit.plural,
                factor=unit.factor * 10.0**power,
                default=default,
            )
    raise KeyError(code)


def _divide_units(dividend: Unit, divisor: Unit, divisor_code: str) -> Unit:
    if dividend.offset or divisor.offset or dividend.is_inverse or divisor.is_inverse:
        raise KeyError(f"{dividend.symbol}/{divisor.symbol}")
    return Unit(
        f"{dividend.kind}/{divisor.kind}",
        f"{get_symbol(dividend)}/{get_symbol(divisor)}",
        f"{dividend.singular} per {divisor.singular}",
        f"{dividend.plural} per {divisor.singular}",
        dividend.factor / divisor.factor,
        f"{dividend.default.split()[0]}/{divisor_code if divisor.kind == 'time' else divisor.default.split()[0]}",
        exponent=dividend.exponent,
    )


def get_symbol(unit: Unit) -> str:
    """Return the symbol of a unit, or its name if it has none."""
    return unit.singular if unit.singular in FULL_NAMES else unit.symbol


def _read_table() -> dict[str, Unit]:
    units_by_code: dict[str, Unit] = {}
    units_by_name: dict[str, Unit] = {}
    for line in _TABLE.read_text(encoding="utf-8").splitlines():
        kind, codes, symbol, singular, plural, factor, default, *offsets = line.split("\t")
        unit = Unit(kind, symbol, singular, plural, float(factor), default, sum(map(float, offsets)))
        units_by_code.update(dict.fromkeys(codes.split(","), unit))
        for name in (singular, plural):
            units_by_name.setdefault(name, unit)
            units_by_name.setdefault(name.replace("metre", "meter").replace("litre", "liter"), unit)
    return units_by_name | units_by_code


UNITS = _read_table()
