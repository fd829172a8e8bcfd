"""What a parser makes of an answer, checked on the way."""

import re

from snugvl.inputs.tools.parser import CallArguments, CallParser, CallStarted, TextPiece


def read(parser: CallParser, *pieces: str, cut: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls of an answer that came in `pieces`; `cut`: a limit ended it."""
    events = [event for piece in pieces for event in parser.push(piece)] + parser.flush(cut=cut)
    text, names, arguments = "", [], {}
    for event in events:
        match event:
            case TextPiece(more):
                assert more, "an empty piece of text"
                text += more
            case CallStarted(index, identity, name):
                assert index == len(names), "calls count from 0"
                assert re.fullmatch("call_[0-9a-f]{24}|[0-9A-Za-z]{9}", identity)
                names.append(name)
                arguments[index] = ""
            case CallArguments(index, fragment):
                assert fragment, "an empty fragment"
                assert index == len(names) - 1
                arguments[index] += fragment
    assert parser.calls == len(names)
    assert parser.flush() == [], "a second flush says nothing"
    return text, [(name, arguments[index]) for index, name in enumerate(names)]
