"""What a choice of moves becomes: the fields of a Plan, what it puts on the host and on the link, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wholestep.graph.bytes import show_bytes
from wholestep.graph.layers import layer_pattern
from wholestep.plan.moves import WINDOWS, Move, Moves


def chosen_moves(moves: Moves | None, away: Sequence[int]) -> list[Move]:
    return [] if moves is None else [moves.moves[number] for number in away]


def placed(moves: Moves | None, away: Sequence[int]) -> dict[str, Any]:
    """`host`, `file` and `state` of a plan. Values fill the host's memory in forward order; what is left goes to files."""
    chosen = chosen_moves(moves, away)
    if moves is None or not chosen:
        return {}
    state = {name: "host" for name in _patterns(moves, chosen)}
    left = moves.room.host_bytes - sum(move.host_bytes for move in chosen if move.value is None)
    host, file = [], []
    for shares in _by_value(chosen).values():
        size = sum(move.host_bytes for move in shares)
        if size <= left or not moves.room.files:
            host.append(shares[-1].name)
            left -= size
        else:
            file.append(shares[-1].name)
    return {"host": tuple(host), "file": tuple(file), "state": state}


def moved(moves: Moves | None, away: Sequence[int]) -> dict[str, Any]:
    """What a choice puts on the host and on the link."""
    chosen = chosen_moves(moves, away)
    if not chosen:
        return {}
    out, back = (sum(sum(getattr(move, way).values()) for move in chosen) for way in ("out", "back"))
    return {"host_bytes": sum(move.host_bytes for move in chosen), "moved_bytes": {"out": out, "in": back}}


def reasons_to_move(moves: Moves | None, away: Sequence[int]) -> dict[str, str]:
    """Why each leaves, and what the link has for it."""
    chosen = chosen_moves(moves, away)
    if moves is None or not chosen:
        return {}
    forward, rest = sum(moves.windows[:WINDOWS]), sum(moves.windows[WINDOWS:])
    hides = {"out": forward / moves.seconds_out, "back": rest / moves.seconds_in}
    found: dict[str, str] = {}
    for shares in _by_value(chosen).values():
        size = sum(move.host_bytes for move in shares)
        text = f"moves {show_bytes(size)} each way; the link hides {show_bytes(hides['out'])} out, {show_bytes(hides['back'])} in"
        found[shares[-1].name] = text
    for name, size in _patterns(moves, chosen).items():
        found[name] = (
            f"state of {show_bytes(size)} lies on the host; the backward pass hides {show_bytes(hides['back'])}"
        )
    return found


def _patterns(moves: Moves, chosen: Sequence[Move]) -> dict[str, int]:
    """Parameters whose state lies on the host -> its bytes; one pattern where all of its parameters are chosen."""
    shares: dict[str, list[Move]] = {}
    for move in moves.moves:
        if move.value is None:
            shares.setdefault(layer_pattern(move.name.partition(",")[0]), []).append(move)
    found: dict[str, int] = {}
    for pattern, parts in shares.items():
        mine = [move for move in parts if move in chosen]
        if len(mine) == len(parts):
            found[pattern] = sum(move.host_bytes for move in mine)
        else:
            found |= {
                name: move.host_bytes // len(names)
                for move in mine
                for names in [move.name.split(",")]
                for name in names
            }
    return found


def _by_value(chosen: Sequence[Move]) -> dict[str, list[Move]]:
    """Value -> its shares, in order."""
    found: dict[str, list[Move]] = {}
    for move in chosen:
        if move.value is not None:
            found.setdefault(move.value, []).append(move)
    return found
