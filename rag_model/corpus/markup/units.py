"""Units of `{{convert}}`: symbol, names, size in base units, and the default unit to convert to.

One line per unit: codes (the first is the symbol unless `symbol` differs), singular, plural,
factor, default output. Factors convert to metres, square metres, cubic metres, kilograms, metres
per second, joules, watts, pascals, kelvins (and so on); only units of one kind are converted into
each other. Sources: NIST SP 811, appendix B; Module:Convert/documentation for defaults.
"""

from typing import NamedTuple


class Unit(NamedTuple):
    """One unit of measure; `value * factor + offset` is in the base unit of its `kind`."""

    kind: str
    symbol: str
    singular: str
    plural: str
    factor: float
    default: str
    offset: float = 0.0


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
ft,foot,feet | foot | feet | .3048 | m
in,inch,inches | inch | inches | .0254 | mm
nmi | nautical mile | nautical miles | 1852 | km mi
furlong | furlong | furlongs | 201.168 | ft m
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
cm3,cc | cubic centimetre | cubic centimetres | 1e-6 | cuin
L,l,litre,liter | litre | litres | .001 | impgal USgal
mL,ml | millilitre | millilitres | 1e-6 | impfloz USfloz
hL,hl | hectolitre | hectolitres | .1 | impgal USgal
cumi,mi3 | cubic mile | cubic miles | 4168181825.440579584 | km3
cuyd | cubic yard | cubic yards | .764554857984 | m3
cuft,ft3 | cubic foot | cubic feet | .028316846592 | m3
cuin,in3 | cubic inch | cubic inches | 1.6387064e-5 | cm3
USgal,U.S.gal,usgal | US gallon | US gallons | .003785411784 | L impgal
impgal | imperial gallon | imperial gallons | .00454609 | L USgal
USfloz | US fluid ounce | US fluid ounces | 2.95735295625e-5 | mL
impfloz | imperial fluid ounce | imperial fluid ounces | 2.84130625e-5 | mL
USqt | US quart | US quarts | .000946352946 | L
imppt | imperial pint | imperial pints | .00056826125 | L
USbbl,bbl,oilbbl | barrel | barrels | .158987294928 | m3
acre.ft,acreft | acre-foot | acre-feet | 1233.48183754752 | m3
USbsh,bu | US bushel | US bushels | .03523907016688 | L
mass
t,tonne,MT | tonne | tonnes | 1000 | LT ST
kg | kilogram | kilograms | 1 | lb
g | gram | grams | .001 | oz
mg | milligram | milligrams | 1e-6 | gr
μg,ug,µg | microgram | micrograms | 1e-9 | gr
lb,lbs | pound | pounds | .45359237 | kg
oz | ounce | ounces | .028349523125 | g
ozt | troy ounce | troy ounces | .0311034768 | g
st | stone | stone | 6.35029318 | lb kg
ST,shton,tonUS | short ton | short tons | 907.18474 | LT t
LT,lton,tonUK | long ton | long tons | 1016.0469088 | ST t
gr | grain | grains | 6.479891e-5 | g
cwt | hundredweight | hundredweight | 50.80234544 | kg
speed
km/h,kph,kmh | kilometre per hour | kilometres per hour | .2777777777777778 | mph
m/s | metre per second | metres per second | 1 | ft/s
km/s | kilometre per second | kilometres per second | 1000 | mi/s
mph,mi/h | mile per hour | miles per hour | .44704 | km/h
mi/s | mile per second | miles per second | 1609.344 | km/s
ft/s | foot per second | feet per second | .3048 | m/s
ft/min | foot per minute | feet per minute | .00508 | m/s
kn,knot,kt | knot | knots | .5144444444444445 | km/h mph
energy
J | joule | joules | 1 | ftlb
kJ | kilojoule | kilojoules | 1000 | kcal
MJ | megajoule | megajoules | 1e6 | kWh
kWh | kilowatt hour | kilowatt hours | 3.6e6 | MJ
cal | calorie | calories | 4.184 | J
kcal,Cal | kilocalorie | kilocalories | 4184 | kJ
ftlb,ftlbf | foot-pound | foot-pounds | 1.3558179483314004 | J
BTU,Btu | British thermal unit | British thermal units | 1055.05585262 | kJ
eV | electronvolt | electronvolts | 1.602176634e-19 | J
power
W | watt | watts | 1 | hp
kW | kilowatt | kilowatts | 1000 | hp
MW | megawatt | megawatts | 1e6 | hp
GW | gigawatt | gigawatts | 1e9 | hp
hp,bhp,shp,ihp | horsepower | horsepower | 745.6998715822702 | kW
PS,ps | metric horsepower | metric horsepower | 735.49875 | kW
pressure
Pa | pascal | pascals | 1 | psi
hPa | hectopascal | hectopascals | 100 | inHg
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
K | kelvin | kelvins | 1 | C
°R,R | degree Rankine | degrees Rankine | .5555555555555556 | K
temperature difference
C-change | degree Celsius | degrees Celsius | 1 | F-change
F-change | degree Fahrenheit | degrees Fahrenheit | .5555555555555556 | C-change
force
N | newton | newtons | 1 | lbf
kN | kilonewton | kilonewtons | 1000 | lbf
MN | meganewton | meganewtons | 1e6 | lbf
lbf | pound-force | pounds-force | 4.4482216152605 | N
kgf | kilogram-force | kilograms-force | 9.80665 | N
torque
Nm | newton-metre | newton-metres | 1 | lbft
lbft | pound-foot | pound-feet | 1.3558179483314004 | Nm
flow
m3/s | cubic metre per second | cubic metres per second | 1 | cuft/s
cuft/s | cubic foot per second | cubic feet per second | .028316846592 | m3/s
L/min | litre per minute | litres per minute | 1.6666666666666667e-5 | USgal/min
USgal/min | US gallon per minute | US gallons per minute | 6.30901964e-5 | L/min
density
g/cm3 | gram per cubic centimetre | grams per cubic centimetre | 1000 | lb/cuin
kg/m3 | kilogram per cubic metre | kilograms per cubic metre | 1 | lb/cuyd
lb/cuin | pound per cubic inch | pounds per cubic inch | 27679.904710203125 | g/cm3
lb/cuyd | pound per cubic yard | pounds per cubic yard | .5932764212577829 | kg/m3
population density
/km2,PD/km2 | inhabitant per square kilometre | inhabitants per square kilometre | 1e-6 | /sqmi
/sqmi,PD/sqmi | inhabitant per square mile | inhabitants per square mile | 3.861021585424458e-7 | /km2
/ha | per hectare | per hectare | 1e-4 | /acre
/acre | per acre | per acre | .00024710538146716535 | /ha
time
h | hour | hours | 3600 | min
min | minute | minutes | 60 | s
s | second | seconds | 1 | min
d | day | days | 86400 | h
fuel distance
km/L,km/l | kilometre per litre | kilometres per litre | 1e6 | mpgus
mpgus,mpgUS | mile per US gallon | miles per US gallon | 425143.7074976 | km/L
mpgimp | mile per imperial gallon | miles per imperial gallon | 354006.18984 | km/L
frequency
Hz | hertz | hertz | 1 | rpm
"""
_SYMBOLS = {
    "km2": "km²", "m2": "m²", "cm2": "cm²", "mm2": "mm²", "km3": "km³", "m3": "m³", "cm3": "cm³",
    "sqmi": "sq mi", "sqyd": "sq yd", "sqft": "sq ft", "sqin": "sq in", "acre": "acres",
    "cumi": "cu mi", "cuyd": "cu yd", "cuft": "cu ft", "cuin": "cu in", "acre.ft": "acre⋅ft",
    "USgal": "US gal", "impgal": "imp gal", "USfloz": "US fl oz", "impfloz": "imp fl oz", "USqt": "US qt",
    "imppt": "imp pt", "USbbl": "bbl", "USbsh": "US bsh", "ST": "short tons", "LT": "long tons",
    "ftlb": "ft⋅lbf", "Nm": "N⋅m", "lbft": "lb⋅ft", "torr": "Torr", "mpgus": "mpg‑US", "mpgimp": "mpg‑imp",
    "m3/s": "m³/s", "cuft/s": "cu ft/s", "USgal/min": "US gal/min", "C-change": "°C", "F-change": "°F",
    "g/cm3": "g/cm³", "kg/m3": "kg/m³", "lb/cuin": "lb/cu in", "lb/cuyd": "lb/cu yd",
    "/km2": "/km²", "/sqmi": "/sq mi",
}  # fmt: skip


def _parse_table(table: str) -> dict[str, Unit]:
    units: dict[str, Unit] = {}
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
            *map(float, offset),
        )
        units.update(dict.fromkeys([*names, singular, plural], unit))
    return units


UNITS = _parse_table(_TABLE)
