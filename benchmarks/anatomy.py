"""Where a scaled step spends more than a plain one: the same step with one part after another left out."""

import argparse
from collections.abc import Callable

import mindspore as ms
from mindspore import Tensor, nn

import lossscale
from benchmarks import timing, workloads
from benchmarks.baselines import Order, OrderAndBranch
from benchmarks.mindspore_steps import timed
from benchmarks.nets import build_net

WORKLOADS = {"GRAPH": ["mlp_b16_h128_l60", "transformer"], "PYNATIVE": ["mlp_b64_h512_l4", "mlp_b16_h2048_l6"]}
VARIANTS = ["plain", "plain again", "order", "order and branch", "ours", "no update of the scale", "no branch"]
VARIANTS += ["neither", "ours, fused"]


class WithoutBranch(lossscale.TrainOneStepWithLossScaleCell):
    """Steps whether or not there was an overflow: no `if` around the optimizer."""

    def step_or_keep_flags(self, overflow, grads, flags):
        return self.step(grads)


def build(variant: str, workload: str) -> Callable[[], float]:
    """Return one training step as a function that ends by reading the loss."""
    net, inputs, targets = build_net(workload)
    network = nn.WithLossCell(net, nn.MSELoss())
    parameters = network.trainable_params()
    momentum = lossscale.FusedMomentum if variant == "ours, fused" else nn.Momentum
    optimizer = momentum(parameters, workloads.LEARNING_RATE, workloads.MOMENTUM)
    update = lossscale.DynamicLossScaleUpdateCell(workloads.LOSS_SCALE, 2, 10**6)
    scale = Tensor(workloads.LOSS_SCALE, ms.float32)
    ours = lossscale.TrainOneStepWithLossScaleCell
    cells: dict[str, Callable[[], nn.Cell]] = {
        "order": lambda: Order(network, optimizer),
        "order and branch": lambda: OrderAndBranch(network, optimizer),
        "ours": lambda: ours(network, optimizer, update),
        "ours, fused": lambda: ours(network, optimizer, update),
        "no update of the scale": lambda: ours(network, optimizer, scale),
        "no branch": lambda: WithoutBranch(network, optimizer, update),
        "neither": lambda: WithoutBranch(network, optimizer, scale),
    }
    cell = cells.get(variant, lambda: nn.TrainOneStepCell(network, optimizer))()
    return timed(cell.set_train(), parameters, inputs, targets)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=list(WORKLOADS), default="GRAPH")
    parser.add_argument("--rounds", type=int, default=workloads.ROUNDS)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE if options.mode == "GRAPH" else ms.PYNATIVE_MODE)
    names = WORKLOADS[options.mode]
    rows = {
        f"{name}, {options.mode}": lambda name=name: {variant: build(variant, name) for variant in VARIANTS}
        for name in names
    }
    timing.write(options.out, timing.measure(rows, options.rounds))
