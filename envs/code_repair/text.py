"""Functions of strings and of lists of words."""

from __future__ import annotations

from envs.code_repair.inputs import (
    args,
    letter_list,
    separator,
    two_words,
    word,
    word_list,
    word_or_palindrome,
    words_and_prefix,
)
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
            'initial: out = "" => out = text',
            "variable: c + out => out + c",
            "variable: return out => return text",
            "bounds: in text: => in text[1:]:",
        ),
        args(word),
        (("",), ("ab",), ("stone",)),
    ),
    Template(
        ("is_palindrome", "palindrome", "is_mirror"),
        """def f(text):
    n = len(text)
    for i in range(n // 2):
        if text[i] != text[n - i - 1]:
            return False
    return True
""",
        faults(
            "comparison: text[i] != => text[i] ==",
            "operator: n // 2 => n * 2",
            "bounds: n - i - 1 => n - i",
            "bounds: n - i - 1 => i + 1",
            "variable: return False => return text",
        ),
        args(word_or_palindrome),
        (("",), ("ab",), ("abca",), ("racecar",)),
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
            "builtin: out.get(w, 0) => len(w)",
            "variable: return out => return words",
            "bounds: in words: => in words[1:]:",
        ),
        args(letter_list),
        (([],), (["x"],), (["b", "b", "b"],)),
    ),
    Template(
        ("join_with", "joined", "glue_all"),
        """def f(words, sep):
    out = words[0]
    for w in words[1:]:
        out += sep + w
    return out
""",
        faults(
            "bounds: words[1:] => words[2:]",
            "bounds: in words[1:]: => in words:",
            "initial: out = words[0] => out = words[-1]",
            "variable: sep + w => w + sep",
            "variable: return out => return w",
        ),
        args(word_list(2, 3), separator),
        ((["x"], ","), (["p", "q", "r"], "--")),
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
            "builtin: upper() => title()",
            "builtin: append => extend",
            "variable: return out => return words",
            "variable: append(w.upper()) => append(w)",
            "bounds: in words: => in words[:-1]:",
        ),
        args(word_list(1, 3)),
        (([],), (["ok"],), (["red", "fox"],)),
    ),
    Template(
        ("with_prefix", "starting_with", "match_start"),
        """def f(words, head):
    out = []
    for w in words:
        if w.startswith(head):
            out.append(w)
    return out
""",
        faults(
            "builtin: startswith => endswith",
            "builtin: append => extend",
            "comparison: if w => if not w",
            "variable: append(w) => append(head)",
            "variable: return out => return words",
            "initial: out = [] => out = [head]",
        ),
        words_and_prefix,
        (([], "a"), (["ab", "ba"], "a"), (["x", "xy", "zz"], "x")),
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
            "comparison: len(w) > len(out) => len(w) == len(out)",
            "variable: return out => return w",
            "variable: out = w => out = words",
            'initial: out = "" => out = "longest"',
            "bounds: in words: => in words[1:]:",
        ),
        args(word_list(2, 3)),
        (([],), (["ab"],), (["one", "three", "two"],)),
    ),
    Template(
        ("count_vowels", "num_vowels", "vowels"),
        """def f(text):
    out = 0
    for c in text:
        if c in "aeiou":
            out += 1
    return out
""",
        faults(
            "comparison: if c in => if c not in",
            "operator: out += 1 => out -= 1",
            "initial: out = 0 => out = 1",
            "variable: return out => return c",
            "variable: return out => return text",
            "bounds: in text: => in text[1:]:",
        ),
        args(word),
        (("",), ("xyz",), ("idea",)),
    ),
    Template(
        ("title_case", "capitalize_all", "titled"),
        """def f(text):
    out = []
    for w in text.split():
        out.append(w.capitalize())
    return " ".join(out)
""",
        faults(
            "builtin: capitalize() => lower()",
            "builtin: capitalize() => upper()",
            "builtin: append => extend",
            "builtin: text.split() => text.strip()",
            "variable: append(w.capitalize()) => append(w)",
            "bounds: split(): => split()[1:]:",
        ),
        two_words,
        (("",), ("x",), ("big red fox",)),
    ),
)
