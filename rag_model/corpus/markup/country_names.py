"""Countries by the codes that stand for them in `{{FRA}}` and `{{flag|FRA}}`: ISO's and Olympic ones."""

_PAIRS = """
AFG Afghanistan|AGO Angola|ANG Angola|AIA Anguilla|ALB Albania|ALG Algeria|DZA Algeria|AND Andorra|
ARE United Arab Emirates|UAE United Arab Emirates|ARG Argentina|ARM Armenia|ASM American Samoa|
ATG Antigua and Barbuda|ANT Antigua and Barbuda|AUS Australia|AUT Austria|AZE Azerbaijan|ABW Aruba|
ARU Aruba|BDI Burundi|BEL Belgium|BEN Benin|BFA Burkina Faso|BUR Burkina Faso|BGD Bangladesh|BAN Bangladesh|
BGR Bulgaria|BUL Bulgaria|BHR Bahrain|BRN Bahrain|BHS Bahamas|BAH Bahamas|BIH Bosnia and Herzegovina|
BLR Belarus|BLZ Belize|BIZ Belize|BMU Bermuda|BER Bermuda|BOL Bolivia|BRA Brazil|BRB Barbados|BAR Barbados|
BRU Brunei|BTN Bhutan|BHU Bhutan|BWA Botswana|BOT Botswana|BVT Bouvet Island|CAF Central African Republic|
CAN Canada|CHE Switzerland|SUI Switzerland|CHL Chile|CHI Chile|CHN China|PRC China|CIV Ivory Coast|
CMR Cameroon|COD Democratic Republic of the Congo|COG Republic of the Congo|CGO Republic of the Congo|
COK Cook Islands|COL Colombia|COM Comoros|CPV Cape Verde|CRI Costa Rica|CRC Costa Rica|CUB Cuba|CUR Curaçao|
CUW Curaçao|CYM Cayman Islands|CAY Cayman Islands|CYP Cyprus|CZE Czech Republic|TCH Czechoslovakia|
DEU Germany|GER Germany|GDR East Germany|FRG West Germany|DJI Djibouti|DMA Dominica|DNK Denmark|DEN Denmark|
DOM Dominican Republic|ECU Ecuador|EGY Egypt|ENG England|ERI Eritrea|ESH Western Sahara|ESP Spain|
EST Estonia|ETH Ethiopia|EU European Union|EUR Europe|FIN Finland|FJI Fiji|FIJ Fiji|FLK Falkland Islands|
FRA France|FRO Faroe Islands|FSM Micronesia|GAB Gabon|GBR United Kingdom|UK United Kingdom|
UKGBI United Kingdom|GEO Georgia|GGY Guernsey|GHA Ghana|GIB Gibraltar|GIN Guinea|GUI Guinea|GMB The Gambia|
GAM The Gambia|GNB Guinea-Bissau|GBS Guinea-Bissau|GNQ Equatorial Guinea|GEQ Equatorial Guinea|GRC Greece|
GRE Greece|GRD Grenada|GRN Grenada|GRL Greenland|GTM Guatemala|GUA Guatemala|GUM Guam|GUY Guyana|
HKG Hong Kong|HND Honduras|HON Honduras|HRV Croatia|CRO Croatia|HTI Haiti|HAI Haiti|HUN Hungary|
IDN Indonesia|INA Indonesia|IMN Isle of Man|IOM Isle of Man|IND India|IRL Ireland|IRN Iran|IRI Iran|
IRQ Iraq|ISL Iceland|ISR Israel|ITA Italy|JAM Jamaica|JEY Jersey|JOR Jordan|JPN Japan|KAZ Kazakhstan|
KEN Kenya|KGZ Kyrgyzstan|KHM Cambodia|CAM Cambodia|KIR Kiribati|KNA Saint Kitts and Nevis|
SKN Saint Kitts and Nevis|KOR South Korea|KOS Kosovo|KWT Kuwait|KUW Kuwait|LAO Laos|LBN Lebanon|LIB Lebanon|
LBR Liberia|LBY Libya|LBA Libya|LCA Saint Lucia|LIE Liechtenstein|LKA Sri Lanka|SRI Sri Lanka|LSO Lesotho|
LES Lesotho|LTU Lithuania|LUX Luxembourg|LVA Latvia|LAT Latvia|MAC Macau|MAF Saint Martin|MAR Morocco|
MCO Monaco|MON Monaco|MDA Moldova|MDG Madagascar|MAD Madagascar|MDV Maldives|MEX Mexico|
MHL Marshall Islands|MKD Macedonia|MLI Mali|MLT Malta|MMR Myanmar|MYA Myanmar|MNE Montenegro|MNG Mongolia|
MGL Mongolia|MOZ Mozambique|MRT Mauritania|MTN Mauritania|MSR Montserrat|MUS Mauritius|MRI Mauritius|
MWI Malawi|MAW Malawi|MYS Malaysia|MAS Malaysia|NAM Namibia|NCL New Caledonia|NER Niger|NIG Niger|
NGA Nigeria|NGR Nigeria|NIC Nicaragua|NCA Nicaragua|NIR Northern Ireland|NLD Netherlands|NED Netherlands|
NOR Norway|NPL Nepal|NEP Nepal|NRU Nauru|NZL New Zealand|OMN Oman|OMA Oman|PAK Pakistan|PAN Panama|PER Peru|
PHL Philippines|PHI Philippines|PLW Palau|PNG Papua New Guinea|POL Poland|PRI Puerto Rico|PUR Puerto Rico|
PRK North Korea|PRT Portugal|POR Portugal|PRY Paraguay|PAR Paraguay|PSE Palestine|PLE Palestine|
PYF French Polynesia|QAT Qatar|ROC Taiwan|ROM Romania|ROU Romania|RUS Russia|RWA Rwanda|SAU Saudi Arabia|
KSA Saudi Arabia|SCG Serbia and Montenegro|SCO Scotland|SDN Sudan|SUD Sudan|SEN Senegal|SGP Singapore|
SIN Singapore|SGS South Georgia and the South Sandwich Islands|SHN Saint Helena|SLB Solomon Islands|
SLE Sierra Leone|SLV El Salvador|ESA El Salvador|SMR San Marino|SOM Somalia|SRB Serbia|SSD South Sudan|
STP São Tomé and Príncipe|SUN Soviet Union|URS Soviet Union|USSR Soviet Union|SUR Suriname|SVK Slovakia|
SVN Slovenia|SLO Slovenia|SWE Sweden|SWZ Swaziland|SXM Sint Maarten|SYC Seychelles|SEY Seychelles|SYR Syria|
TCA Turks and Caicos Islands|TCD Chad|CHA Chad|TGO Togo|TOG Togo|THA Thailand|TJK Tajikistan|
TKM Turkmenistan|TLS East Timor|TON Tonga|TGA Tonga|TPE Chinese Taipei|TTO Trinidad and Tobago|
TRI Trinidad and Tobago|TUN Tunisia|TUR Turkey|TUV Tuvalu|TWN Taiwan|TZA Tanzania|TAN Tanzania|UGA Uganda|
UKR Ukraine|URY Uruguay|URU Uruguay|USA United States|US United States|UZB Uzbekistan|VAT Vatican City|
VCT Saint Vincent and the Grenadines|VIN Saint Vincent and the Grenadines|VEN Venezuela|
VGB British Virgin Islands|VIR United States Virgin Islands|VNM Vietnam|VIE Vietnam|VUT Vanuatu|VAN Vanuatu|
WAL Wales|WSM Samoa|SAM Samoa|YEM Yemen|YUG Yugoslavia|ZAF South Africa|RSA South Africa|ZMB Zambia|
ZAM Zambia|ZWE Zimbabwe|ZIM Zimbabwe
"""
COUNTRY_NAMES = dict(pair.strip().split(" ", 1) for pair in _PAIRS.replace("\n", " ").split("|"))
