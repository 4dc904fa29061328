"""Where a scaled step spends more than a plain one: the same step with one part after another left out."""

import argparse

import mindspore as ms
from mindspore import Tensor, nn

import lossscale
from benchmarks import timing, workloads
from benchmarks.mindspore_steps import build_net

WORKLOAD = "mlp_b16_h128_l60"


class WithoutBranch(lossscale.TrainOneStepWithLossScaleCell):
    """Steps whether or not there was an overflow: no `if` around the optimizer."""

    def step_or_keep_flags(self, overflow, grads, flags):
        return self.step(grads)


def build(variant: str):
    """Return one training step as a function that ends by reading the loss."""
    net, inputs, targets = build_net(WORKLOAD)
    network = nn.WithLossCell(net, nn.MSELoss())
    optimizer = nn.Momentum(network.trainable_params(), workloads.LEARNING_RATE, workloads.MOMENTUM)
    update = lossscale.DynamicLossScaleUpdateCell(workloads.LOSS_SCALE, 2, 10**6)
    scale = Tensor(workloads.LOSS_SCALE, ms.float32)
    cells = {
        "plain": lambda: nn.TrainOneStepCell(network, optimizer),
        "plain again": lambda: nn.TrainOneStepCell(network, optimizer),
        "ours": lambda: lossscale.TrainOneStepWithLossScaleCell(network, optimizer, update),
        "no update of the scale": lambda: lossscale.TrainOneStepWithLossScaleCell(network, optimizer, scale),
        "no branch": lambda: WithoutBranch(network, optimizer, update),
        "neither": lambda: WithoutBranch(network, optimizer, scale),
    }
    cell = cells[variant]().set_train()
    x, y = Tensor(inputs), Tensor(targets)

    def step() -> float:
        outputs = cell(x, y)
        return float((outputs[0] if isinstance(outputs, tuple) else outputs).asnumpy())

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["GRAPH", "PYNATIVE"], default="GRAPH")
    parser.add_argument("--rounds", type=int, default=workloads.ROUNDS)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE if options.mode == "GRAPH" else ms.PYNATIVE_MODE)
    variants = ["plain", "plain again", "ours", "no update of the scale", "no branch", "neither"]
    rows = {f"{WORKLOAD}, {options.mode}": lambda: {variant: build(variant) for variant in variants}}
    timing.write(options.out, timing.measure(rows, options.rounds))
