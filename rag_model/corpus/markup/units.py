"""Units of `{{convert}}`: symbol, names, size in base units, and the default unit to convert to.

One line per unit: codes (the first is the symbol unless `symbol` differs), singular, plural,
factor, default output. Factors convert to metres, square metres, cubic metres, kilograms, metres
per second, joules, watts, pascals, kelvins (and so on); only units of one kind are converted into
each other. Metric prefixes, powers of ten (`e6acre`) and quotients (`kg/ha`) are derived. Sources:
NIST SP 811, appendix B; Module:Convert/documentation for defaults.
"""

import re
from functools import lru_cache
from typing import NamedTuple


class Unit(NamedTuple):
    """One unit of measure; `value * factor + offset` is the value in the base unit of its `kind`.

    For an inverse unit (L/100 km), the value in the base unit is the reciprocal of this product.
    """

    kind: str
    symbol: str
    singular: str
    plural: str
    factor: float
    default: str
    offset: float = 0.0
    exponent: int = 0  # power of ten that is part of the factor, as in `e6acre`

    @property
    def is_inverse(self) -> bool:
        """Whether a larger value means a smaller quantity of the kind."""
        return self.symbol == "L/100 km"

    def to_base(self, value: float) -> float:
        """Convert a value of this unit to the base unit of its kind."""
        return 1 / (value * self.factor) if self.is_inverse else value * self.factor + self.offset

    def from_base(self, value: float) -> float:
        """Convert a value of the base unit to this unit."""
        return 1 / (value * self.factor) if self.is_inverse else (value - self.offset) / self.factor


_TABLE = """
length
km | kilometre | kilometres | 1000 | mi
m | metre | metres | 1 | ftin
cm | centimetre | centimetres | .01 | in
mm | millimetre | millimetres | .001 | in
μm,um,µm | micrometre | micrometres | 1e-6 | in
nm | nanometre | nanometres | 1e-9 | in
mi | mile | miles | 1609.344 | km
yd | yard | yards | .9144 | m
foot | foot | foot | .3048 | m
ft,feet | foot | feet | .3048 | m
in,inch,inches | inch | inches | .0254 | mm
smi | statute mile | statute miles | 1609.344 | km
nmi | nautical mile | nautical miles | 1852 | km mi
furlong | furlong | furlongs | 201.168 | ft m
rd,rod | rod | rods | 5.0292 | ft m
fathom | fathom | fathoms | 1.8288 | ft m
ch | chain | chains | 20.1168 | ft m
hand | hand | hands | .1016 | in cm
league | league | leagues | 4828.032 | km
ly | light-year | light-years | 9.4607304725808e15 | AU
pc | parsec | parsecs | 3.0856775814913673e16 | ly
AU,au | astronomical unit | astronomical units | 149597870700 | km mi
area
km2,km² | square kilometre | square kilometres | 1e6 | sqmi
m2,m² | square metre | square metres | 1 | sqft
cm2,cm² | square centimetre | square centimetres | 1e-4 | sqin
mm2 | square millimetre | square millimetres | 1e-6 | sqin
ha | hectare | hectares | 1e4 | acre
sqmi,mi2 | square mile | square miles | 2589988.110336 | km2
acre,acres | acre | acres | 4046.8564224 | ha
sqyd,yd2 | square yard | square yards | .83612736 | m2
sqft,ft2 | square foot | square feet | .09290304 | m2
sqin,in2 | square inch | square inches | .00064516 | cm2
volume
km3 | cubic kilometre | cubic kilometres | 1e9 | cumi
m3,m³ | cubic metre | cubic metres | 1 | cuft
cc | cubic centimetre | cubic centimetres | 1e-6 | cuin
cm3 | cubic centimetre | cubic centimetres | 1e-6 | cuin
l | litre | litres | .001 | impgal USgal
L,litre,liter | litre | litres | .001 | impgal USgal
mL,ml | millilitre | millilitres | 1e-6 | impfloz USfloz
hL,hl | hectolitre | hectolitres | .1 | impgal USgal
cumi,mi3 | cubic mile | cubic miles | 4168181825.440579584 | km3
cuyd | cubic yard | cubic yards | .764554857984 | m3
cuft,ft3 | cubic foot | cubic feet | .028316846592 | m3
cuin,in3 | cubic inch | cubic inches | 1.6387064e-5 | cm3
U.S.gal | U.S. gallon | U.S. gallons | .003785411784 | L impgal
USgal,usgal,gal | US gallon | US gallons | .003785411784 | L impgal
impgal | imperial gallon | imperial gallons | .00454609 | L USgal
USfloz,USoz | US fluid ounce | US fluid ounces | 2.95735295625e-5 | mL
impfloz,impoz | imperial fluid ounce | imperial fluid ounces | 2.84130625e-5 | mL
USqt | US quart | US quarts | .000946352946 | L
USpt | US pint | US pints | .000473176473 | L imppt
impqt | imperial quart | imperial quarts | .0011365225 | mL USfloz
imppt | imperial pint | imperial pints | .00056826125 | L
USbbl | US barrel | US barrels | .119240471196 | L USgal impgal
oilbbl,bbl | barrel | barrels | .158987294928 | m3
acre.ft,acreft,acre-ft,acre·ft | acre-foot | acre-feet | 1233.48183754752 | m3
USbsh,bu | US bushel | US bushels | .03523907016688 | L USdrygal impgal
USdrygal | US dry gallon | US dry gallons | .00440488377086 | L
mass
MT | metric ton | metric tons | 1000 | LT ST
tonne | tonne | tonnes | 1000 | shton
t | tonne | tonnes | 1000 | LT ST
kt | kilotonne | kilotonnes | 1e6 | LT ST
kg | kilogram | kilograms | 1 | lb
g | gram | grams | .001 | oz
mg | milligram | milligrams | 1e-6 | gr
μg,ug,µg,mcg | microgram | micrograms | 1e-9 | gr
lb,lbs | pound | pounds | .45359237 | kg
oz | ounce | ounces | .028349523125 | g
ozt | troy ounce | troy ounces | .0311034768 | oz g
st | stone | stone | 6.35029318 | lb kg
shton | ton | tons | 907.18474 | t
ST,tonUS | short ton | short tons | 907.18474 | t
LT,lton,tonUK | long ton | long tons | 1016.0469088 | t
gr | grain | grains | 6.479891e-5 | g
carat | carat | carats | .0002 | g
cwt | hundredweight | hundredweight | 50.80234544 | kg
speed
km/h,kph,kmh | kilometre per hour | kilometres per hour | .2777777777777778 | mph
m/s | metre per second | metres per second | 1 | ft/s
km/s | kilometre per second | kilometres per second | 1000 | mi/s
mph,mi/h | mile per hour | miles per hour | .44704 | km/h
mi/s | mile per second | miles per second | 1609.344 | km/s
ft/s | foot per second | feet per second | .3048 | m/s
ft/min | foot per minute | feet per minute | .00508 | m/min
m/min | metre per minute | metres per minute | .016666666666666667 | ft/min
kn,knot | knot | knots | .5144444444444445 | km/h mph
energy
J | joule | joules | 1 | cal
kJ | kilojoule | kilojoules | 1000 | cal
MJ | megajoule | megajoules | 1e6 | kWh
Wh | watt-hour | watt-hours | 3600 | kJ
kWh | kilowatt-hour | kilowatt-hours | 3.6e6 | MJ
MWh | megawatt-hour | megawatt-hours | 3.6e9 | GJ
GWh | gigawatt-hour | gigawatt-hours | 3.6e12 | TJ
TWh | terawatt-hour | terawatt-hours | 3.6e15 | PJ
cal | calorie | calories | 4.184 | J
Cal | calorie | calories | 4184 | kJ
kcal | kilocalorie | kilocalories | 4184 | kJ
ftlbf | foot-pound force | foot-pounds force | 1.3558179483314004 | J
ftlb | foot-pound | foot-pounds | 1.3558179483314004 | J
BTU,Btu | British thermal unit | British thermal units | 1055.05585262 | kJ
eV | electronvolt | electronvolts | 1.602176634e-19 | aJ
tonTNT | ton of TNT | tons of TNT | 4.184e9 | GJ
tTNT | tonne of TNT | tonnes of TNT | 4.184e9 | GJ
ktTNT | kilotonne of TNT | kilotonnes of TNT | 4.184e12 | TJ
power
W | watt | watts | 1 | hp
kW | kilowatt | kilowatts | 1000 | hp
MW | megawatt | megawatts | 1e6 | hp
GW | gigawatt | gigawatts | 1e9 | hp
bhp | brake horsepower | brake horsepower | 745.6998715822702 | kW
shp | shaft horsepower | shaft horsepower | 745.6998715822702 | kW
ihp | indicated horsepower | indicated horsepower | 745.6998715822702 | kW
hp | horsepower | horsepower | 745.6998715822702 | kW
PS,ps | metric horsepower | metric horsepower | 735.49875 | kW
pressure
Pa | pascal | pascals | 1 | psi
hPa | hectopascal | hectopascals | 100 | psi
kPa | kilopascal | kilopascals | 1000 | psi
MPa | megapascal | megapascals | 1e6 | psi
GPa | gigapascal | gigapascals | 1e9 | psi
bar | bar | bars | 1e5 | kPa
mbar | millibar | millibars | 100 | hPa
atm | standard atmosphere | standard atmospheres | 101325 | kPa
psi | pound per square inch | pounds per square inch | 6894.757293168361 | kPa
inHg | inch of mercury | inches of mercury | 3386.388640341 | kPa
mmHg,torr | millimetre of mercury | millimetres of mercury | 133.322387415 | kPa
temperature
°C,C,degC | degree Celsius | degrees Celsius | 1 | F | 273.15
°F,F,degF | degree Fahrenheit | degrees Fahrenheit | .5555555555555556 | C | 255.3722222222222
K | kelvin | kelvins | 1 | C F
°R,R | degree Rankine | degrees Rankine | .5555555555555556 | K F C
temperature difference
C-change | degree Celsius change | degrees Celsius change | 1 | F-change
F-change | degree Fahrenheit change | degrees Fahrenheit change | .5555555555555556 | C-change
force
N | newton | newtons | 1 | lbf
kN | kilonewton | kilonewtons | 1000 | lbf
MN | meganewton | meganewtons | 1e6 | lbf
lbf | pound-force | pounds-force | 4.4482216152605 | N
kgf | kilogram-force | kilograms-force | 9.80665 | N lbf
torque
Nm,N.m,N·m,N⋅m | newton-metre | newton-metres | 1 | lbft
lb.ft,lb·ft,lbf.ft | pound force-foot | pound force-feet | 1.3558179483314004 | Nm
lbft | pound-foot | pound-feet | 1.3558179483314004 | Nm
flow
m3/s | cubic metre per second | cubic metres per second | 1 | cuft/s
cuft/s | cubic foot per second | cubic feet per second | .028316846592 | m3/s
L/min | litre per minute | litres per minute | 1.6666666666666667e-5 | impgal/min USgal/min
impgal/min | imperial gallon per minute | imperial gallons per minute | 7.57681666667e-5 | L/min
m3/min | cubic metre per minute | cubic metres per minute | .016666666666666667 | cuft/min
cuft/min | cubic foot per minute | cubic feet per minute | .0004719474432 | m3/min
USgal/min | US gallon per minute | US gallons per minute | 6.30901964e-5 | m3/s
density
g/cm3 | gram per cubic centimetre | grams per cubic centimetre | 1000 | lb/cuin
kg/m3 | kilogram per cubic metre | kilograms per cubic metre | 1 | lb/cuyd
lb/cuin | pound per cubic inch | pounds per cubic inch | 27679.904710203125 | g/cm3
lb/cuyd | pound per cubic yard | pounds per cubic yard | .5932764212577829 | kg/m3
population density
/km2,/sqkm | per square kilometre | per square kilometre | 1e-6 | /sqmi
PD/km2,PD/sqkm | inhabitant per square kilometre | inhabitants per square kilometre | 1e-6 | PD/sqmi
/sqmi | per square mile | per square mile | 3.861021585424458e-7 | /km2
PD/sqmi | inhabitant per square mile | inhabitants per square mile | 3.861021585424458e-7 | PD/km2
/ha | per hectare | per hectare | 1e-4 | /acre
/acre | per acre | per acre | .00024710538146716535 | /ha
time
h | hour | hours | 3600 | min
min | minute | minutes | 60 | s
s | second | seconds | 1 | min
d | day | days | 86400 | h
fuel distance
km/L,km/l | kilometre per litre | kilometres per litre | 1e6 | mpgimp mpgus
L/100km,L/100 km | litre per 100 kilometres | litres per 100 kilometres | 1e-8 | mpgimp mpgus
mpgus,mpgUS | mile per US gallon | miles per US gallon | 425143.7074976 | L/100km mpgimp
mpgimp | mile per imperial gallon | miles per imperial gallon | 354006.18984 | L/100km mpgus
acceleration
m/s2 | metre per second squared | metres per second squared | 1 | ft/s2
ft/s2 | foot per second squared | feet per second squared | .3048 | m/s2
g0 | standard gravity | standard gravities | 9.80665 | m/s2
frequency
Hz | hertz | hertz | 1 | rpm
"""
_SYMBOLS = {
    "km2": "km²", "m2": "m²", "cm2": "cm²", "mm2": "mm²", "km3": "km³", "m3": "m³", "cm3": "cm³",
    "sqmi": "sq mi", "sqyd": "sq yd", "sqft": "sq ft", "sqin": "sq in",
    "cumi": "cu mi", "cuyd": "cu yd", "cuft": "cu ft", "cuin": "cu in", "acre.ft": "acre⋅ft",
    "USgal": "US gal", "impgal": "imp gal", "USfloz": "US fl oz", "impfloz": "imp fl oz", "USqt": "US qt",
    "imppt": "imp pt", "U.S.gal": "U.S. gal", "USpt": "US pt", "impqt": "imp qt", "USbbl": "US bbl",
    "oilbbl": "bbl", "USbsh": "US bsh", "USdrygal": "US dry gal", "MT": "t", "tonne": "t", "foot": "ft",
    "ftlb": "ft⋅lb", "ftlbf": "ft⋅lbf", "Nm": "N⋅m", "lbft": "lb⋅ft", "lb.ft": "lb⋅ft",
    "torr": "Torr", "mpgus": "mpg‑US", "mpgimp": "mpg‑imp",
    "m3/s": "m³/s", "cuft/s": "cu ft/s", "USgal/min": "US gal/min", "C-change": "°C", "F-change": "°F",
    "g/cm3": "g/cm³", "kg/m3": "kg/m³", "lb/cuin": "lb/cu in", "lb/cuyd": "lb/cu yd",
    "/km2": "/km²", "/sqmi": "/sq mi", "PD/km2": "/km²", "PD/sqmi": "/sq mi",
    "L/100km": "L/100 km", "m3/min": "m³/min", "cuft/min": "cu ft/min", "impgal/min": "imp gal/min",
    "m/s2": "m/s²", "ft/s2": "ft/s²", "K": "K", "hand": "h",
}  # fmt: skip


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
# Default outputs that differ from those of the unit without prefix.
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
        KeyError: There is no such unit.
    """
    if code in UNITS:
        return UNITS[code]
    if len(code) > _MAX_CODE:
        raise KeyError(code)
    if (scaled := _SCALED.fullmatch(code)) and not _SCALED.match(scaled[2]):
        unit, exponent = find_unit(scaled[2]), int(scaled[1])
        default = _PREFIXED_DEFAULTS.get(code, unit.default)
        return unit._replace(factor=unit.factor * 10.0**exponent, default=default, exponent=exponent)
    if large := _LARGE.fullmatch(code):
        return find_unit(f"e{_PREFIXES[large[1]][1]}{large[2]}")
    top, slash, bottom = code.partition("/")
    if top and slash and "/" not in bottom:
        return _divide_units(find_unit(top), find_unit(bottom), bottom)
    return _add_prefix(code)


def _add_prefix(code: str) -> Unit:
    for prefix, (name, power) in _PREFIXES.items():
        if code.startswith(prefix) and (base := code.removeprefix(prefix)) in _PREFIXED_CODES:
            unit = UNITS[base]
            default = _PREFIXED_DEFAULTS.get(code, unit.default)
            symbol = code.replace("µ", "μ")
            return unit._replace(
                symbol=symbol,
                singular=name + unit.singular,
                plural=name + unit.plural,
                factor=unit.factor * 10.0**power,
                default=default,
            )
    raise KeyError(code)


def _divide_units(top: Unit, bottom: Unit, bottom_code: str) -> Unit:
    if top.offset or bottom.offset or top.is_inverse or bottom.is_inverse:
        raise KeyError(f"{top.symbol}/{bottom.symbol}")
    return Unit(
        f"{top.kind}/{bottom.kind}",
        f"{get_symbol(top)}/{get_symbol(bottom)}",
        f"{top.singular} per {bottom.singular}",
        f"{top.plural} per {bottom.singular}",
        top.factor / bottom.factor,
        f"{top.default.split()[0]}/{bottom_code if bottom.kind == 'time' else bottom.default.split()[0]}",
        exponent=top.exponent,
    )


def get_symbol(unit: Unit) -> str:
    """Return the symbol of a unit, or its name if it has none."""
    return unit.singular if unit.singular in FULL_NAMES else unit.symbol


def _parse_table(table: str) -> dict[str, Unit]:
    units: dict[str, Unit] = {}
    names_of_units: dict[str, Unit] = {}
    kind = ""
    for line in table.strip().splitlines():
        codes, *columns = (column.strip() for column in line.split("|"))
        if not columns:
            kind = codes
            continue
        names = codes.split(",")
        singular, plural, factor, default, *offset = columns
        unit = Unit(
            kind,
            _SYMBOLS.get(names[0], names[0]),
            singular,
            plural,
            float(factor),
            default,
            float(offset[0]) if offset else 0.0,
        )
        units.update(dict.fromkeys(names, unit))
        for name in (singular, plural):
            names_of_units.setdefault(name, unit)
            names_of_units.setdefault(name.replace("metre", "meter").replace("litre", "liter"), unit)
    return names_of_units | units


UNITS = _parse_table(_TABLE)
