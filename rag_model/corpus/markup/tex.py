r"""Convert TeX formulas to one line of text, as a reader would type it.

Without formulas, sentences would have gaps ("where is the energy"), but raw TeX is mostly braces
and typesetting commands. Therefore `E = mc^2` is kept, `\frac{a}{b}` becomes `a/b`, Greek letters
and operators become their characters, and typesetting commands are removed. Matrices, aligned
equations and long derivations are dropped: on one line they are unreadable.
"""

import re
from collections.abc import Iterator

MAX_TEX_CHARS = 400  # characters of TeX; longer formulas are displays that do not fit into one line
MAX_DEPTH = 20  # maximum depth of groups

_SYMBOL_PAIRS = (
    "alpha α beta β gamma γ delta δ epsilon ε varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι "
    "kappa κ lambda λ mu μ nu ν xi ξ pi π rho ρ sigma σ tau τ upsilon υ phi φ varphi φ chi χ psi ψ "
    "omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Phi Φ Psi Ψ Omega Ω infty ∞ "
    "partial ∂ nabla ∇ hbar ħ ell ℓ aleph ℵ emptyset ∅ varnothing ∅ times × cdot · pm ± mp ∓ div ÷ "
    "leq ≤ le ≤ geq ≥ ge ≥ neq ≠ ne ≠ approx ≈ sim ∼ simeq ≃ cong ≅ equiv ≡ propto ∝ in ∈ notin ∉ "
    "ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇ cup ∪ cap ∩ setminus ∖ forall ∀ exists ∃ neg ¬ "
    "lnot ¬ land ∧ wedge ∧ lor ∨ vee ∨ oplus ⊕ otimes ⊗ to → rightarrow → longrightarrow → "
    "leftarrow ← leftrightarrow ↔ Rightarrow ⇒ implies ⇒ Leftrightarrow ⇔ iff ⇔ mapsto ↦ "
    "rightleftharpoons ⇌ sum ∑ prod ∏ int ∫ oint ∮ iint ∬ ldots … cdots … dots … vdots … circ ∘ "
    "dotsb … dotsc … dotsi … dotsm … dotso … ddots … bullet • star ⋆ ast ∗ prime ′ angle ∠ perp ⊥ "
    "parallel ∥ mid | vert | langle ⟨ rangle ⟩ lceil ⌈ rceil ⌉ lfloor ⌊ rfloor ⌋ ll ≪ gg ≫ lbrace "
    "( rbrace ) degree ° R ℝ N ℕ Z ℤ Q ℚ C ℂ"
)
_SYMBOLS = dict(zip(_SYMBOL_PAIRS.split()[::2], _SYMBOL_PAIRS.split()[1::2], strict=True))
_FUNCTIONS = (
    "sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln exp lim max min sup inf "
    "det dim ker deg gcd arg mod bmod pmod Pr Re Im"
)
_TOKEN = re.compile(r"\\([A-Za-z]+)\*?|\\(.)|\s+|(.)", re.DOTALL)
_MARK_COMMANDS = {
    "sqrt": "√",
    "bar": "\u0304",
    "overline": "\u0304",
    "hat": "\u0302",
    "tilde": "\u0303",
    "dot": "\u0307",
    "vec": "\u20d7",
}
_ESCAPED = {char: char for char in "%$&#_"} | {"{": "(", "}": ")", "|": "‖"}
_SPACES = {"~": " ", "&": " ", " ": " "}
_SPACE = re.compile(r"\s+")
_BRACKETED = re.compile(r"\([^()]*\)")
_COMPOUND = re.compile(r"[\s+\-−±×·/=]")
SUPERSCRIPTS = str.maketrans("0123456789+-−()n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁽⁾ⁿ")
_SUPERSCRIPTABLE = re.compile(r"[0-9+\-−()n]+")


_END_TAG = re.compile(r"</\w*>?")  # an HTML tag, which no formula contains


def render_tex(tex: str) -> str:
    r"""Render a formula as one line of text, or "" for a display that does not fit into one line.

    >>> render_tex(r"\frac{1}{2} m v^2 \leq \mathrm{const}")
    '1/2 m v² ≤ const'
    """
    if len(tex) > MAX_TEX_CHARS or r"\begin" in tex:
        return ""
    tokens = _TOKEN.finditer(_END_TAG.sub("", tex))
    return _SPACE.sub(" ", _render_group(tokens, 0)).strip()


def format_superscript(text: str) -> str:
    """Format a superscript with Unicode characters if they exist, otherwise with `^`.

    >>> format_superscript("-6"), format_superscript("x"), format_superscript("2x")
    ('⁻⁶', '^x', '^(2x)')
    """
    if _SUPERSCRIPTABLE.fullmatch(text):
        return text.translate(SUPERSCRIPTS)
    return f"^({text})" if len(text) > 1 else "^" + text


def _render_group(tokens: Iterator[re.Match[str]], depth: int) -> str:
    """Render tokens up to the brace that closes this group, or to the end."""
    pieces: list[str] = []
    while (piece := _render_atom(tokens, depth)) is not None:
        pieces.append(piece)
    return "".join(pieces)


def _render_atom(tokens: Iterator[re.Match[str]], depth: int) -> str | None:
    """Render the next letter, group, or command with arguments; None at the end of the group."""
    token = next(tokens, None)
    if token is None or token[3] == "}":
        return None
    if token[1]:
        return _render_command(token[1], tokens, depth)
    if token[3] == "{":
        return _render_group(tokens, depth + 1) if depth < MAX_DEPTH else ""
    if token[3] in {"^", "_"}:
        argument = _render_argument(tokens, depth)
        return _render_power(argument) if token[3] == "^" else "_" + _add_brackets(argument)
    return _ESCAPED.get(token[2], " ") if token[2] else _SPACES.get(token[3] or " ", token[3])


def _render_argument(tokens: Iterator[re.Match[str]], depth: int) -> str:
    """Render the next group or letter after any spaces."""
    while (piece := _render_atom(tokens, depth)) is not None:
        if piece.strip():
            return piece.strip()
    return ""


def _render_command(name: str, tokens: Iterator[re.Match[str]], depth: int) -> str:
    if name in _SYMBOLS:
        return _SYMBOLS[name]
    if name in _FUNCTIONS.split():
        return f" {name} "
    if name in {"frac", "dfrac", "tfrac", "cfrac"}:
        return f"{_add_brackets(_render_argument(tokens, depth))}/{_add_brackets(_render_argument(tokens, depth))}"
    if name in {"binom", "tbinom", "dbinom"}:
        return f"C({_render_argument(tokens, depth)}, {_render_argument(tokens, depth)})"
    if name in _MARK_COMMANDS:
        return _render_mark(_render_argument(tokens, depth), _MARK_COMMANDS[name])
    # Commands for fonts and spacing have no text.
    return " " if name in {"quad", "qquad", "limits"} else ""


def _render_mark(text: str, mark: str) -> str:
    if mark == "√":
        return mark + _add_brackets(text)
    # The accent is kept because it changes the meaning: the mean of x is not x.
    return text + mark if len(text) == 1 else text


def _render_power(text: str) -> str:
    return {"∘": "°", "′": "′"}.get(text) or format_superscript(text)


def _add_brackets(text: str) -> str:
    return f"({text})" if len(text) > 1 and _COMPOUND.search(text) and not _BRACKETED.fullmatch(text) else text
