"""Do the ranks of a data-parallel job start alike? Checked once, before the first step, so that none drifts unseen."""

from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, context, nn, ops
from mindspore import dtype as mstype
from mindspore.communication import GlobalComm, get_group_size, get_rank


def is_data_parallel() -> bool:
    """Return whether train cells built now reduce their gradients over devices."""
    return context.get_auto_parallel_context("parallel_mode") in ("data_parallel", "hybrid_parallel")


def has_shards() -> bool:
    """Return whether MindSpore may spread each weight over devices, so that a gradient here may be a part of one."""
    return context.get_auto_parallel_context("parallel_mode") in ("semi_auto_parallel", "auto_parallel")


def world_size() -> int:
    """Return the number of ranks that share the gradients: 1 outside data parallel."""
    return get_group_size() if is_data_parallel() and GlobalComm.INITED else 1


def rank() -> int:
    """Return the number of this rank: 0 outside data parallel."""
    return get_rank() if world_size() > 1 else 0


def check_world(owner: str) -> None:
    """Raise RuntimeError if data parallel is set but there is nobody to share gradients with."""
    if not is_data_parallel() or world_size() > 1:
        return
    reason = "there is only one rank" if GlobalComm.INITED else "mindspore.communication.init() was not called"
    raise RuntimeError(
        f"For '{owner}', the parallel mode is data_parallel, but {reason}. Start the script by "
        "`msrun --worker_num=2 --local_worker_num=2 script.py` and call init() first, or leave the parallel mode at "
        "STAND_ALONE."
    )


def gather(values: np.ndarray) -> np.ndarray:
    """Return the int32 vector `values` of every rank, shape (ranks, n). A host call that all ranks must make."""
    everyone = ops.AllGather()(Tensor(values, mstype.int32))
    return everyone.asnumpy().reshape(-1, values.size)


def on_any_rank(flag: Tensor) -> Tensor:
    """Return whether the bool `flag` is set on any rank: outside data parallel, `flag`. All ranks must make this call.

    One SUM of one float32: MCCL on CPU knows no other type and no other reduction.
    """
    if world_size() == 1:
        return flag
    return ops.AllReduce()(flag.astype(mstype.float32).reshape(())) > 0


def check_ranks_agree(train_cell: nn.Cell) -> None:
    """Raise RuntimeError on every rank if their loss scales or the counters behind them differ.

    Ranks take the same decisions from then on, so what is equal at the start stays equal. One small AllGather.

    Args:
        train_cell: a `TrainOneStepWithLossScaleCell`.
    """
    if world_size() == 1:
        return
    parameters = [p for p in _scale_state(train_cell) if p.size == 1 and p.dtype in (mstype.float32, mstype.int32)]
    values = [p.asnumpy().reshape(1) for p in parameters]
    everyone = gather(np.concatenate([value.view(np.int32) for value in values]))
    for place, (parameter, value) in enumerate(zip(parameters, values)):
        by_rank = np.ascontiguousarray(everyone[:, place]).view(value.dtype)
        if not (everyone[:, place] == everyone[0, place]).all():
            raise RuntimeError(
                f"The ranks start with different values of '{parameter.name}': {by_rank.tolist()}, by rank. They would "
                "skip and scale differently. Build all train cells with the same arguments, and restore all ranks "
                "from checkpoints of the same step."
            )


def _scale_state(train_cell: Any) -> list[Parameter]:
    update = train_cell.loss_scaling_manager
    return [train_cell.scale_sense, *(update.get_parameters() if update is not None else [])]
