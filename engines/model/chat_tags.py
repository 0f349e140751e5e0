"""Tags of chat templates beyond Jinja's own. Imports jinja2 at the top, so it is imported where a template is read."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationTag(Extension):
    """`{% generation %}` marks what a model said, for training; the text is that without it."""

    tags = {"generation"}  # noqa: RUF012 - as the library has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
