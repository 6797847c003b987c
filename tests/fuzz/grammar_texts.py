"""Makes hostile, odd and ordinary JSON schemas, regexes, grammars and structural tags from a seed.

Owns what is drawn. Refuses to know how a server is asked, and which of it a server may take.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Mapping
from typing import Any

NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 10, 16, 100, 255, 256, 1000, 19_999, 20_000, 20_001),
    *(
        sign * (1 << power) + add
        for power in (7, 15, 16, 31, 32, 53, 62, 63, 64)
        for sign in (1, -1)
        for add in (-1, 0, 1)
    ),
    *(10**19, 10**20, -(10**20), 10**30, 10**300),
    *(0.0, -0.0, 0.1, 0.5, 1.5, 1 / 3, 2.5, -2.5, 0.01, 1e-5, 1e-9, 1e-10, 1e-17, 1e-300, -1e-300),
    *(5e-324, -5e-324, 2.2250738585072014e-308, 1e15, 1e16, 1e20, 1e21, 1e30, -1e30, 1e39, 1e300),
    *(1e308, -1e308, 1.7976931348623157e308, -1.7976931348623157e308, 9007199254740993.0),
)
TEXTS = (
    *("", "a", "x", "y", "n", "the cat", "é", "ß", "😀", "\u0000", "\n", "\r\n", "\t"),
    *('"', "\\", "/", "'", "\u2028", "\ufeff", "\uffff", "a\u0301", "<think>", "</think>", "<tool_call>"),
    *("</tool_call>", "<|im_end|>", "<|im_start|>", "{", "}", "[", "null", "1", "-0", "__proto__", "$ref"),
    *("a" * 200, "ab" * 3000, "%s%n", "../..", "~0", "~1", "a b", " "),
)
JUNK: tuple[Any, ...] = (
    None,
    True,
    False,
    "",
    "x",
    [],
    [[]],
    [None],
    {},
    {"": {}},
    {"x": 1},
    -1,
    1.5,
    1 << 63,
    "\ud800",
)
NAMES = ("a", "b", "c", "n", "x", "", "é", "a b", "</tool_call>", '"', "\n", "$ref", "a" * 100)
TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
FORMATS = (
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "regex"),
    *("uri-reference", "json-pointer", "unknown", ""),
)
REFS = (
    *("#", "#/$defs/a", "#/$defs/b", "#/$defs/c", "#/definitions/a", "#/properties/a", "#/properties/n"),
    *(
        "#/$defs",
        "#/properties",
        "#a",
        "#/",
        "##",
        "",
        "/",
        "x",
        "https://example.com/s",
        "file:///etc/passwd",
    ),
    *("#/%zz", "#/$defs/%61", "#/$defs/a~1b", "#/$defs/~", "#/allOf/0", "#/anyOf/1", "#/items", "#/enum/0"),
    *("#/" + "a/" * 300, "#/$defs/a/$defs/a", "#/not", "#/if", "#/prefixItems/0"),
)
EDGE_COUNTS = (0, 1, 2, 3, 5, 10, 100, 1000, 20_000, 20_001, (1 << 31) - 1, 1 << 31, 1 << 63, -1, 1e3, 2.5)
OPTIONS = (
    *("[lazy]", "[capture]", '[stop="x"]', "[max_tokens=3]", "[temperature=0.5]", "[suffix=/x/]", "[nope]"),
    *("[max_tokens=-1]", ".2"),
)
DIRECTIVES = (
    *("%ignore / +/", "%ignore WS", '%ignore ""', "%import common.INT", "%import common.NOPE", "%import x.y"),
    *("%declare B", '%override start: "a"', '%extend a: "b"', "%json {}", "// x", "%llguidance {}"),
    *('%llguidance {"no_forcing": true}', '%llguidance {"x": 1}', "%llguidance {"),
)
TOKENS = (
    *("<|im_end|>", "<[5]>", "<[0-9]>", "<[^1]>", "<[99999999]>", "<[]>", "<x>", "<[5-]>", "<[^0-2999]>"),
    *("<think>", "<[4294967296]>", "<[9-3]>", "<|nope|>"),
)
Json = dict[str, Any]


class Maker:
    """Draws from one random source."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self._keywords: Mapping[str, Callable[[int], Any]] = {
            "type": self._type,
            "enum": self._enum,
            "const": self.value,
            "default": self.value,
            "properties": self._named,
            "patternProperties": self._patterns,
            "additionalProperties": self.schema,
            "propertyNames": self.schema,
            "required": lambda depth: draw.sample(NAMES, draw.randrange(5)),
            "dependentRequired": lambda depth: {draw.choice(NAMES): draw.sample(NAMES, 2)},
            "dependentSchemas": self._named,
            "dependencies": self._named,
            "$defs": self._named,
            "definitions": self._named,
            "allOf": self._list,
            "anyOf": self._list,
            "oneOf": self._list,
            "prefixItems": self._list,
            "not": self.schema,
            "if": self.schema,
            "then": self.schema,
            "else": self.schema,
            "items": lambda depth: self._list(depth) if draw.random() < 0.15 else self.schema(depth),
            "additionalItems": self.schema,
            "contains": self.schema,
            "unevaluatedProperties": self.schema,
            "unevaluatedItems": self.schema,
            "contentSchema": self.schema,
            **dict.fromkeys(("minimum", "maximum", "multipleOf"), self._number),
            **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), self._number),
            **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), self._count),
            **dict.fromkeys(("minContains", "maxContains", "minProperties", "maxProperties"), self._count),
            "uniqueItems": lambda depth: draw.random() < 0.8,
            "pattern": lambda depth: self.regex(depth),
            "format": lambda depth: draw.choice(FORMATS),
            "$ref": lambda depth: draw.choice(REFS),
            "$dynamicRef": lambda depth: draw.choice(REFS),
            "$anchor": lambda depth: draw.choice("ab"),
            "$id": lambda depth: draw.choice(("https://example.com/s", "#a", "")),
            "$schema": lambda depth: draw.choice(("http://json-schema.org/draft-04/schema#", "x")),
            "x-guidance": lambda depth: draw.choice(({"whitespace_flexible": True}, {"x": 1}, 1)),
            "title": lambda depth: draw.choice(TEXTS),
            "nullable": lambda depth: True,
            "discriminator": lambda depth: {"propertyName": "a"},
        }
        self._of_type: Mapping[str, tuple[str, ...]] = {
            "object": ("properties", "properties", "required", "additionalProperties", "patternProperties",
                       "minProperties", "maxProperties", "propertyNames", "dependentRequired"),
            "array": ("items", "items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
            "string": ("minLength", "maxLength", "pattern", "format", "enum"),
            "integer": ("minimum", "maximum", "multipleOf", "exclusiveMinimum", "exclusiveMaximum", "enum"),
            "number": ("minimum", "maximum", "multipleOf", "exclusiveMinimum", "exclusiveMaximum", "const"),
            "boolean": ("const", "enum"),
            "null": ("const", "not"),
        }  # fmt: skip

    # -- JSON Schema -----------------------------------------------------------------------------------------

    def root(self) -> Any:
        """A whole schema."""
        draw = self.draw
        if (chance := draw.random()) < 0.06:
            return self._large()
        if chance < 0.08:
            return draw.choice(JUNK)
        schema = self.schema(draw.randint(1, 4))
        if isinstance(schema, dict) and draw.random() < 0.3:
            schema["$defs"] = {name: self.schema(2) for name in draw.sample(("a", "b", "c"), 2)}
        if draw.random() < 0.2:
            self._break(schema)
        return schema

    def schema(self, depth: int) -> Any:
        """A schema of at most so many levels: mostly of one type, with keywords of that type."""
        draw = self.draw
        if (chance := draw.random()) < 0.04 or depth < 0:
            return draw.choice((True, False, {}, {"type": "string"}, {"type": "integer"}))
        if chance < 0.7:
            kind = draw.choice(TYPES if depth else TYPES[2:])
            names = draw.sample(self._of_type[kind], min(draw.randrange(4), len(self._of_type[kind])))
            return {"type": kind, **{name: self._keywords[name](depth - 1) for name in names}}
        names = draw.choices(tuple(self._keywords), k=draw.randint(1, 4))
        return {name: self._keywords[name](depth - 1) for name in names}

    def value(self, depth: int) -> Any:
        """A JSON value."""
        draw = self.draw
        match draw.randrange(6 if depth > 0 else 4):
            case 0 | 1:
                return draw.choice(NUMBERS)
            case 2:
                return draw.choice(TEXTS)
            case 3:
                return draw.choice((None, True, False, [], {}))
            case 4:
                return [self.value(depth - 1) for _ in range(draw.randrange(4))]
            case _:
                return {draw.choice(NAMES): self.value(depth - 1) for _ in range(draw.randrange(3))}

    def _type(self, depth: int) -> Any:
        draw = self.draw
        return draw.choice((draw.choice(TYPES), draw.sample(TYPES, draw.randrange(4)), "any"))

    def _enum(self, depth: int) -> Any:
        return [self.value(1) for _ in range(self.draw.choice((0, 1, 2, 3, 8)))]

    def _number(self, depth: int) -> Any:
        return self.draw.choice(NUMBERS)

    def _count(self, depth: int) -> Any:
        return self.draw.choice(EDGE_COUNTS if self.draw.random() < 0.3 else EDGE_COUNTS[:6])

    def _named(self, depth: int) -> Any:
        return {name: self.schema(depth) for name in self.draw.sample(NAMES, self.draw.randrange(4))}

    def _patterns(self, depth: int) -> Any:
        return {self.regex(1): self.schema(depth) for _ in range(self.draw.randint(1, 3))}

    def _list(self, depth: int) -> Any:
        return [self.schema(depth) for _ in range(self.draw.choice((0, 1, 2, 2, 3)))]

    def _large(self) -> Any:
        """A schema that is long, or deep, or has a lot of one thing."""
        draw = self.draw
        many = draw.choice((70, 300, 1000, 4100))
        match draw.randrange(9):
            case 0:
                return {"enum": [draw.choice((str(index) * 3, index)) for index in range(many)]}
            case 1:
                kind = draw.choice(("anyOf", "oneOf", "allOf"))
                return {kind: [{"const": index, "title": "x"} for index in range(many)]}
            case 2:
                listed = {f"p{index}": self.schema(0) for index in range(min(many, 600))}
                return {"type": "object", "properties": listed, "required": draw.sample([*listed], 5)}
            case 3:
                schema: Any = self.schema(0)
                for _ in range(draw.choice((20, 60, 90, 118, 125))):
                    outer = draw.choice(("items", "not", "additionalProperties", "a"))
                    schema = {"properties": {"a": schema}} if outer == "a" else {outer: schema}
                return schema
            case 4:
                name = draw.choice(("items", "additionalProperties", "anyOf"))
                own: Any = {"$ref": "#/$defs/a"}
                own = [own, {"type": "null"}] if name == "anyOf" else own
                return {"$ref": "#/$defs/a", "$defs": {"a": {name: own, "minItems": draw.randrange(3)}}}
            case 5:
                links = {str(index): {"$ref": f"#/$defs/{index + 1}"} for index in range(min(many, 1000))}
                return {"$ref": "#/$defs/0", "$defs": {**links, str(len(links)): {"type": "null"}}}
            case 6:
                size = draw.choice((50, 2000, 20_000))
                return {"type": "string", "minLength": size, "maxLength": size + draw.choice((0, 1, 10_000))}
            case 7:
                schema = {"type": "integer"}
                for _ in range(draw.choice((4, 8, 12))):
                    schema = {
                        "type": "array",
                        "items": schema,
                        "minItems": draw.choice((2, 9)),
                        "maxItems": 9,
                    }
                return schema
            case _:
                width = draw.choice((5, 8, 11))
                return {"allOf": [{"anyOf": [self.schema(0) for _ in range(width)]} for _ in range(width)]}

    def _break(self, schema: Any) -> None:
        """Put what does not belong there somewhere into a schema."""
        places: list[tuple[Any, Any]] = []
        pending = [schema]
        while pending:
            part = pending.pop()
            pairs = (
                part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
            )
            for key, value in list(pairs):
                places.append((part, key))
                pending.append(value)
        if places:
            part, key = self.draw.choice(places)
            part[key] = self.draw.choice((*JUNK, *NUMBERS[-30:], 10**400, -(10**400)))

    # -- regular expressions ---------------------------------------------------------------------------------

    def regex(self, depth: int = 3) -> str:
        """A regular expression, which a tenth of the time is broken."""
        text = self._alternatives(depth)
        if self.draw.random() < 0.3:
            text = self.draw.choice(("^{}$", "^{}", "{}$", "(?i){}", "(?s){}", "\\A{}\\z", "({})+")).replace(
                "{}", text
            )
        return self.mangled(text, "()[]{}|*+?^$\\.-,&~<>=!:#/") if self.draw.random() < 0.1 else text

    def _alternatives(self, depth: int) -> str:
        count = self.draw.choice((1, 1, 1, 2, 3))
        return "|".join(
            "".join(self._quantified(depth) for _ in range(self.draw.choice((0, 1, 1, 2, 3))))
            for _ in range(count)
        )

    def _quantified(self, depth: int) -> str:
        draw = self.draw
        atom = self._atom(depth)
        if draw.random() < 0.5:
            return atom
        few, many = (draw.choice(EDGE_COUNTS[: 8 if draw.random() < 0.9 else -1]) for _ in range(2))
        counted = (
            f"{{{few}}}",
            f"{{{few},}}",
            f"{{{few},{many}}}",
            f"{{,{many}}}",
            "{}",
            "{a}",
            "{9999999999}",
        )
        plain = ("*", "+", "?", "*?", "+?", "??", "++", "**", "*+")
        return atom + draw.choice(plain if draw.random() < 0.6 else counted)

    def _atom(self, depth: int) -> str:
        draw = self.draw
        if depth > 0 and draw.random() < 0.35:
            inner = self._alternatives(depth - 1)
            opening = draw.choice(
                ("(", "(", "(?:", "(?P<n>", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?#")
            )
            return f"{opening}{inner})"
        if draw.random() < 0.3:
            return self._class()
        return draw.choice(
            (
                *("a", "b", "c", "0", " ", ".", "é", "😀", "\n", '"', "/", "-", "<", "the"),
                *("\\d", "\\D", "\\w", "\\W", "\\s", "\\S", "\\b", "\\B", "\\n", "\\t", "\\\\", "\\.", "\\/"),
                *("\\p{L}", "\\p{Lu}", "\\P{L}", "\\pN", "\\p{Greek}", "\\p{Nope}", "\\x41", "\\x{1F600}"),
                *("\\u0041", "\\u{1F600}", "\\u{110000}", "\\0", "\\1", "\\2", "\\k<n>", "\\Q.\\E", "\\x00"),
                *("^", "$", "\\A", "\\z", "\\Z", "\\R", "\\X", "\\K", "\\G", "\\cA", "\\e", "\\xff", "\\"),
            )
        )

    def _class(self) -> str:
        parts = (
            *("a-z", "0-9", "A", "b", "\\d", "\\s", "\\S", "\\w", "\\p{L}", "[:alpha:]", "[:^digit:]", "z-a"),
            *("-", "^", "]", "\\]", "[", "&&", "--", "~~", "&&[^a]", "é", "\u0000-\U0010ffff", "\\x00-\\xff"),
        )
        chosen = "".join(self.draw.choices(parts, k=self.draw.randrange(4)))
        return f"[{self.draw.choice(('', '', '^'))}{chosen}]"

    # -- grammars --------------------------------------------------------------------------------------------

    def lark(self) -> str:
        """A grammar in Lark, which mostly has a start, and mostly knows what it speaks of."""
        draw = self.draw
        rules = ["start", *draw.sample(("a", "b", "?c", "d1", "_e", "!f"), draw.randrange(4))]
        terminals = draw.sample(("A", "NL", "WS", "_X", "NUMBER"), draw.randrange(4))
        known = [name.strip("?!") for name in rules] + terminals
        lines = []
        for name in rules:
            option = draw.choice(("",) * 4 + OPTIONS)
            lines.append(f"{name}{option}: {self._lark_body(known, 2)}")
        lines += [
            f"{name}{draw.choice(('', '', '.5'))}: {self._terminal(terminals, 2)}" for name in terminals
        ]
        if draw.random() < 0.3:
            lines.append(draw.choice(DIRECTIVES))
        draw.shuffle(lines)
        text = "\n".join(lines) + draw.choice(("", "\n"))
        return self.mangled(text, '():|*+?"/[]{}%.~\\\n<>@&,=') if draw.random() < 0.2 else text

    def _lark_body(self, known: list[str], depth: int) -> str:
        draw = self.draw
        return " | ".join(
            " ".join(self._lark_item(known, depth) for _ in range(draw.choice((0, 1, 1, 2, 3))))
            for _ in range(draw.choice((1, 1, 2, 3)))
        )

    def _lark_item(self, known: list[str], depth: int) -> str:
        draw = self.draw
        chance = draw.random()
        if chance < 0.3:
            item = draw.choice(known)
        elif chance < 0.33:
            item = draw.choice(
                ("missing", "MISSING", "@other", "start{a}", "%ignore", "&a", "~A", "...", "$")
            )
        elif chance < 0.45 and depth > 0:
            item = draw.choice(("({})", "({})", "[{}]")).replace("{}", self._lark_body(known, depth - 1))
        elif chance < 0.5:
            item = f"%json {dumped(self.schema(1))}"
        elif chance < 0.53:
            item = f'%regex {{"substring_chars": {dumped(draw.choice(TEXTS))}}}'
        elif chance < 0.58:
            item = draw.choice(TOKENS)
        else:
            item = self._terminal([], 1)
        counts = EDGE_COUNTS[: 7 if draw.random() < 0.9 else -2]
        few, many = draw.choice(counts), draw.choice(counts)
        repeat = (f"~{few}", f"~{few}..{many}", f"{{{few},{many}}}", f"{{{few},}}")
        more = ("*", "+", "?", "**") if draw.random() < 0.7 else repeat
        return item + (draw.choice(more) if draw.random() < 0.3 else "")

    def _terminal(self, names: list[str], depth: int) -> str:
        draw = self.draw
        match draw.randrange(8):
            case 0 | 1 | 2:
                return dumped(draw.choice(TEXTS)) + draw.choice(("", "", "i", "x"))
            case 3 | 4 | 5:
                pattern = (
                    self.regex(2)
                    if draw.random() < 0.7
                    else draw.choice(("\\n+", "a*", "", "(.|\\n)*", "\\n"))
                )
                return (
                    f"/{pattern.replace('/', chr(92) + '/')}/{draw.choice(('', '', 'i', 's', 'imsx', 'q'))}"
                )
            case 6:
                ends = draw.choice((("a", "z"), ("z", "a"), ("a", "zz"), ("", ""), ("\u0000", "\uffff")))
                return f"{dumped(ends[0])}..{dumped(ends[1])}"
            case _:
                inner = [self._terminal([], 0) for _ in range(2)] + names
                joint = draw.choice((" ", " | ", " & ", " & ~", " ~"))
                return joint.join(draw.sample(inner, 2)) if depth else '"a"'

    def gbnf(self) -> str:
        """A grammar as llama.cpp writes them."""
        draw = self.draw
        names = ["root", *draw.sample(("a", "b-c", "ws", "x1", "d_e"), draw.randrange(4))]
        text = "\n".join(f"{name} ::= {self._gbnf_body(names, 2)}" for name in names)
        if draw.random() < 0.15:
            return "root ::= " + draw.choice(("(", "[", '"')) * draw.choice((3, 300, 4000)) + "a"
        return self.mangled(text, '()[]{}|*+?":=.^-\\\n#,') if draw.random() < 0.2 else text

    def _gbnf_body(self, names: list[str], depth: int) -> str:
        draw = self.draw
        return " | ".join(
            " ".join(self._gbnf_item(names, depth) for _ in range(draw.choice((0, 1, 2, 3))))
            for _ in range(draw.choice((1, 1, 2)))
        )

    def _gbnf_item(self, names: list[str], depth: int) -> str:
        draw = self.draw
        chance = draw.random()
        if chance < 0.35:
            item = draw.choice(names)
        elif chance < 0.45 and depth > 0:
            item = f"({self._gbnf_body(names, depth - 1)})"
        elif chance < 0.65:
            item = draw.choice(
                ("[a-z]", "[^a]", "[]", "[^]", "[\\x00-\\xff]", "[z-a]", "[\\n]", "[a\\]b]", "[^\\n]+")
            )
        elif chance < 0.7:
            item = draw.choice((".", "missing", "# x", "\\", "<[5]>", "!<[5]>", "{", "::="))
        else:
            item = dumped(draw.choice(TEXTS))
        counts = EDGE_COUNTS[:7]
        repeat = (
            f"{{{draw.choice(counts)}}}",
            f"{{{draw.choice(counts)},{draw.choice(counts)}}}",
            "{,3}",
            "{2,}",
        )
        return item + (draw.choice(("*", "+", "?", *repeat)) if draw.random() < 0.35 else "")

    # -- structural tags, choices ----------------------------------------------------------------------------

    def tag(self) -> Any:
        """A structural tag in its new or its older form."""
        draw = self.draw
        if draw.random() < 0.3:
            made: Json = {
                "type": "structural_tag",
                "structures": [
                    {"begin": draw.choice(TEXTS), "schema": self.schema(1), "end": draw.choice(TEXTS)}
                    for _ in range(draw.randrange(4))
                ],
                "triggers": draw.sample(TEXTS, draw.randrange(3)),
            }
            if draw.random() < 0.5 and made["structures"]:
                made["triggers"] = [each["begin"] for each in made["structures"]]
        else:
            made = {"type": "structural_tag", "format": self._tag_form(3)}
        if draw.random() < 0.2:
            self._break(made)
        return made

    def _tag_form(self, depth: int) -> Any:
        draw = self.draw
        own: Callable[[], Any] = lambda: self._tag_form(depth - 1)  # noqa: E731
        leaves: tuple[Callable[[], Any], ...] = (
            lambda: {"type": "const_string", "value": draw.choice(TEXTS)},
            lambda: {"type": "json_schema", "json_schema": self.schema(2)},
            lambda: {"type": "regex", "pattern": self.regex(2)},
            lambda: {"type": "grammar", "grammar": draw.choice((self.lark, self.gbnf))()},
            lambda: {"type": "any_text", "excludes": draw.sample(TEXTS, draw.randrange(3))},
        )
        inner: tuple[Callable[[], Any], ...] = (
            lambda: {
                "type": draw.choice(("sequence", "or")),
                "elements": [own() for _ in range(draw.randrange(4))],
            },
            lambda: self._tagged(depth),
            lambda: {
                "type": "triggered_tags",
                "triggers": draw.choice((["<"], ["a", "<t"], draw.sample(TEXTS, 2))),
                "tags": [self._tagged(depth) for _ in range(draw.randint(1, 3))],
                "at_least_one": draw.random() < 0.5,
                "stop_after_first": draw.random() < 0.5,
            },
            lambda: {
                "type": "tags_with_separator",
                "tags": [self._tagged(depth) for _ in range(draw.randint(1, 3))],
                "separator": draw.choice(TEXTS),
                "at_least_one": draw.random() < 0.5,
                "stop_after_first": draw.random() < 0.5,
            },
        )
        return draw.choice(leaves if depth <= 0 else (*leaves, *inner))()

    def _tagged(self, depth: int) -> Json:
        draw = self.draw
        end: Any = draw.choice(TEXTS) if draw.random() < 0.8 else draw.sample(TEXTS, 2)
        begin = draw.choice(("<a>", "<tool>", "a", draw.choice(TEXTS)))
        return {"type": "tag", "begin": begin, "content": self._tag_form(depth - 1), "end": end}

    def choices(self) -> Any:
        """What `guided_choice` takes, and what it does not."""
        draw = self.draw
        match draw.randrange(6):
            case 0:
                return draw.choice(JUNK)
            case 1:
                return [f"{index}{draw.choice(TEXTS)}" for index in range(draw.choice((50, 1000, 1001)))]
            case 2:
                return [draw.choice((*TEXTS, *JUNK)) for _ in range(3)]
            case _:
                return draw.sample(TEXTS, draw.randint(1, 5))

    def mangled(self, text: str, signs: str) -> str:
        """A text in which something was left out, doubled, put in, or cut off."""
        draw = self.draw
        for _ in range(draw.choice((1, 1, 2, 4))):
            at = draw.randrange(len(text) + 1)
            until = at + draw.randint(1, 6)
            text = draw.choice((
                text[:at] + text[until:],
                text[:at] + draw.choice((*signs, draw.choice(string.printable))) + text[at:],
                text[:at] + text[at:until] * 2 + text[until:],
                text[:at],
                text[:at] + draw.choice(signs) * draw.choice((3, 130, 1000)) + text[at:],
            ))  # fmt: skip
        return text


def dumped(value: Any) -> str:
    """A value as JSON."""
    return json.dumps(value)
