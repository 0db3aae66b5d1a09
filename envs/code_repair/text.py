"""Functions of strings and of lists of words."""

from __future__ import annotations

from envs.code_repair.inputs import args, letter_list, word, word_list
from envs.code_repair.template import Template, faults

TEMPLATES = (
    Template(
        ("reverse", "backwards", "flip"),
        """def f(text):
    out = ""
    for c in text:
        out = c + out
    return out
""",
        faults(
            'initial: out = "" => out = "-"',
            "variable: return out => return text",
            "bounds: in text: => in text[1:]:",
        ),
        args(word),
        (("",), ("ab",), ("stone",)),
    ),
    Template(
        ("count_words", "tally", "frequency"),
        """def f(words):
    out = {}
    for w in words:
        out[w] = out.get(w, 0) + 1
    return out
""",
        faults(
            "operator: 0) + 1 => 0) - 1",
            "initial: get(w, 0) => get(w, 1)",
            "variable: return out => return words",
            "bounds: in words: => in words[1:]:",
        ),
        args(letter_list),
        (([],), (["x"],), (["b", "b", "b"],)),
    ),
    Template(
        ("shout", "all_upper", "to_upper"),
        """def f(words):
    out = []
    for w in words:
        out.append(w.upper())
    return out
""",
        faults(
            "builtin: upper() => lower()",
            "builtin: append => extend",
            "variable: return out => return words",
            "bounds: in words: => in words[:-1]:",
        ),
        args(word_list(1, 3)),
        (([],), (["ok"],), (["red", "fox"],)),
    ),
    Template(
        ("longest", "longest_word", "widest"),
        """def f(words):
    out = ""
    for w in words:
        if len(w) > len(out):
            out = w
    return out
""",
        faults(
            "comparison: len(w) > len(out) => len(w) < len(out)",
            "variable: return out => return w",
            'initial: out = "" => out = "longest"',
            "bounds: in words: => in words[1:]:",
        ),
        args(word_list(2, 3)),
        (([],), (["ab"],), (["one", "three", "two"],)),
    ),
)
