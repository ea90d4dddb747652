"""English names of the languages that `{{lang-xx}}` templates label their words with, by code."""

_PAIRS = """
aa Afar|ab Abkhazian|af Afrikaans|akk Akkadian|am Amharic|an Aragonese|ang Old English|ar Arabic|arc
Aramaic|as Assamese| ast Asturian|av Avar|ay Aymara|az Azerbaijani|ba Bashkir|bar Bavarian|be Belarusian|ber
Berber|bg Bulgarian|bn Bengali|bo Tibetan| br Breton|bs Bosnian|ca Catalan|ce Chechen|ceb Cebuano|chr
Cherokee|cop Coptic|co Corsican|cs Czech|cu Church Slavonic|cv Chuvash| cy Welsh|da Danish|de German|dsb
Lower Sorbian|dv Dhivehi|dz Dzongkha|el Greek|en English|eo Esperanto|es Spanish|et Estonian| eu Basque|fa
Persian|fi Finnish|fil Filipino|fo Faroese|fr French|frm Middle French|fro Old French|fy West Frisian|ga
Irish| gd Scottish Gaelic|gl Galician|gn Guarani|goh Old High German|got Gothic|grc Ancient Greek|grc-gre
Greek|gsw Swiss German| gu Gujarati|gv Manx|ha Hausa|haw Hawaiian|he Hebrew|hi Hindi|hr Croatian|hsb Upper
Sorbian|ht Haitian Creole|hu Hungarian| hy Armenian|ia Interlingua|id Indonesian|ig Igbo|is Icelandic|it
Italian|iu Inuktitut|ja Japanese|jv Javanese|ka Georgian| kk Kazakh|kl Greenlandic|km Khmer|kn Kannada|ko
Korean|ku Kurdish|kw Cornish|ky Kyrgyz|la Latin|lad Ladino|lb Luxembourgish| li Limburgish|lmo Lombard|ln
Lingala|lo Lao|lt Lithuanian|lv Latvian|mg Malagasy|mi Māori|mk Macedonian|ml Malayalam|mn Mongolian| mr
Marathi|ms Malay|mt Maltese|my Burmese|nah Nahuatl|nap Neapolitan|nb Norwegian Bokmål|nds Low German|ne
Nepali|nl Dutch| nn Norwegian Nynorsk|no Norwegian|non Old Norse|nv Navajo|oc Occitan|oj Ojibwe|om Oromo|or
Odia|os Ossetian|ota Ottoman Turkish| pa Punjabi|pal Middle Persian|peo Old Persian|phn Phoenician|pi Pali|pl
Polish|ps Pashto|pt Portuguese|qu Quechua|rm Romansh| ro Romanian|ru Russian|rw Kinyarwanda|sa Sanskrit|sah
Yakut|sc Sardinian|scn Sicilian|sco Scots|sd Sindhi|se Northern Sami| sh Serbo-Croatian|si Sinhala|sk
Slovak|sl Slovene|sm Samoan|sn Shona|so Somali|sq Albanian|sr Serbian|st Sotho|su Sundanese| sux Sumerian|sv
Swedish|sw Swahili|syc Syriac|syr Syriac|ta Tamil|te Telugu|tet Tetum|tg Tajik|th Thai|ti Tigrinya|tk
Turkmen| tl Tagalog|tn Tswana|to Tongan|tr Turkish|ts Tsonga|tt Tatar|uk Ukrainian|ug Uyghur|ur Urdu|uz
Uzbek|vec Venetian|vi Vietnamese| vo Volapük|wa Walloon|wo Wolof|xh Xhosa|yi Yiddish|yo Yoruba|za Zhuang|zh
Chinese|zu Zulu
"""
LANGUAGE_NAMES = dict(pair.strip().split(" ", 1) for pair in _PAIRS.replace("\n", " ").split("|"))
