"""What is said about a run: the line of an overflow, the error that stops a run, the summary of a history."""

import math
from collections import Counter

UNKNOWN = ["unknown"]


def scale_text(scale: float) -> str:
    """Return a loss scale as it is read best: whole numbers without a point."""
    return f"{scale:.0f}" if math.isfinite(scale) and scale == int(scale) and scale < 1e15 else f"{scale:g}"


def summarize(history: list) -> str:
    """Return a few lines about a history: steps, overflows, the scale, the loss, and which parameters overflowed."""
    overflows = [record for record in history if record["overflow"]]
    scales = [history[0]["loss_scale"], *(record["next_loss_scale"] for record in history)]
    losses = [record["loss"] for record in history if math.isfinite(record["loss"])]
    steps = sum(record["steps"] for record in history)
    count = sum(record["new_overflows"] for record in history)
    lines = [
        f"steps       {history[0]['step'] - history[0]['steps'] + 1} to {history[-1]['step']} ({steps} recorded)",
        f"overflows   {count} ({count / steps:.2%} of the steps), "
        f"longest run {max(record['in_a_row'] for record in history)}",
        f"loss scale  {scale_text(scales[0])} -> {scale_text(scales[-1])} "
        f"(smallest {scale_text(min(scales))}, largest {scale_text(max(scales))})",
    ]
    if losses:
        lines.append(f"loss        {losses[0]:.4g} -> {losses[-1]:.4g} (smallest {min(losses):.4g})")
    else:
        lines.append("loss        never finite")
    if overflows:
        first, last = overflows[0], overflows[-1]
        lines.append(f"            first overflow at step {first['step']}, last at step {last['step']}")
        names = Counter(name for record in overflows for name in record["parameters"])
        lines.append("overflowed  " + ", ".join(f"{name} ({times}x)" for name, times in names.most_common(5)))
    return "\n".join(lines)


def overflow_line(record: dict) -> str:
    """Return the line that reports a record with an overflow."""
    names = record["parameters"]
    where = names[0] if names != UNKNOWN else "an unknown parameter"
    more = f" (+{len(names) - 1} more)" if len(names) > 1 else ""
    before, after = scale_text(record["loss_scale"]), scale_text(record["next_loss_scale"])
    scale = f"scale {before} -> {after}" if before != after else f"scale stays {before}"
    row = f", {_ordinal(record['in_a_row'])} in a row" if record["in_a_row"] > 1 else ""
    if record["steps"] == 1:
        return f"step {record['step']}: overflow in {where}{more}, {scale}{row}"
    first = record["step"] - record["steps"] + 1
    count = record["new_overflows"]
    return (
        f"steps {first} to {record['step']}: {count} overflow{'s' if count > 1 else ''}, "
        f"the last in {where}{more}, {scale}{row}"
    )


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"


def explain_overflows(history: list, in_a_row: int) -> str:
    """Return the error text of `stop_after`."""
    streak = [record for record in history if record["overflow"]][-in_a_row:]
    scales = [streak[0]["loss_scale"], *(record["next_loss_scale"] for record in streak)]
    shown = [scale_text(scale) for scale in scales]
    if len(shown) > 8:
        shown = [*shown[:4], "...", *shown[-3:]]
    counts = Counter(name for record in streak for name in record["parameters"])
    names = ", ".join(f"{name} ({times}x)" for name, times in counts.most_common(5))
    if len(counts) > 5:
        names += f" and {len(counts) - 5} more"
    finite = sum(math.isfinite(record["loss"]) for record in streak)
    if finite == len(streak):
        forward = "finite every time: only the backward pass overflows"
        advice = (
            "start from a smaller scale (find_loss_scale recommends one), lower min_loss_scale, clip or lower the "
            "learning rate, or keep the layers named above in float32"
        )
    else:
        forward = f"inf or nan in {len(streak) - finite} of {len(streak)}: no loss scale can help there"
        advice = (
            "look for inf or nan in the data and in the weights, lower the learning rate, or keep the layer that "
            "overflows in the forward pass in float32"
        )
    return (
        f"{in_a_row} overflows in a row, up to step {streak[-1]['step']}; no weight has moved since unless "
        "drop_overflow_update=False.\n"
        f"  loss scale:   {' -> '.join(shown)}\n"
        f"  overflow in:  {names}\n"
        f"  forward loss: {forward}\n"
        f"  what to try:  {advice}.\n"
        "The train cell is intact: mindspore.save_checkpoint(train_cell, path) saves it."
    )
