"""What is compiled for devices. As a script it compiles named cases in this process and writes what came of each.

    python -m tests.devices.cases FOLDER --device Ascend --jit-level O0 --parallel stand_alone CASE...

A line of JSON for each case goes to standard output; its graph is dumped into FOLDER/CASE.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import lossscale
from tests.nets import LeNet5, mlp

BATCH = 8


def inputs(*shape, classes=0):
    """Return inputs and targets, the targets like the inputs or one of `classes`."""
    x = Tensor(np.ones((BATCH, *shape), np.float32))
    return (x, x) if not classes else (x, Tensor(np.zeros((BATCH, classes), np.float32)))


def momentum(network):
    return nn.Momentum(network.trainable_params(), 0.1, 0.9)


def dynamic():
    return lossscale.DynamicLossScaleUpdateCell(2.0**16, 2, 1000)


def train_cell(
    network=None, optimizer=momentum, scale=dynamic, base=lossscale.TrainOneStepWithLossScaleCell, **options
):
    """Return a train cell of a small network."""
    network = network or mlp(8, 16, 8)
    return base(nn.WithLossCell(network, nn.MSELoss()), optimizer(network), scale(), **options).set_train()


def small(**options):
    return train_cell(**options), inputs(8)


class Deep(nn.Cell):
    """60 dense layers: 120 parameters."""

    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.SequentialCell(*[nn.Dense(width, width) for _ in range(60)])

    def construct(self, x):
        return self.layers(x)


def deep(**options):
    return train_cell(Deep(), **options), inputs(8)


EVERYTHING = {
    "accumulate_steps": 2,
    "drop_overflow_update": False,
    "outputs": ("loss", "overflow", "loss_scale", "grad_norm", "learning_rate", "updated"),
}


def everything():
    return {**EVERYTHING, "clip_grad": lossscale.ClipByGlobalNorm(1.0, skip_above=100.0), "ema": lossscale.EMA(0.99)}


def summing():
    """Every option that goes with sums of gradients where weights are sharded."""
    outputs = tuple(name for name in EVERYTHING["outputs"] if name != "grad_norm")
    return {**EVERYTHING, "outputs": outputs, "clip_grad": lossscale.ClipByValue(1.0), "ema": lossscale.EMA(0.99)}


def scale_of_the_call():
    network = mlp(8, 16, 8)
    cell = lossscale.TrainOneStepWithLossScaleCell(nn.WithLossCell(network, nn.MSELoss()), momentum(network))
    return cell.set_train(), (*inputs(8), Tensor(1024.0))


def custom():
    network = mlp(8, 16, 8)
    cell = lossscale.CustomTrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), momentum(network), 1024.0)
    return cell.set_train(), inputs(8)


MANAGERS = {
    "none": lambda: None,
    "fixed": lambda: lossscale.FixedLossScaleManager(1024.0),
    "dynamic": lambda: lossscale.DynamicLossScaleManager(2**16),
}


def built(level, manager):
    network = mlp(8, 16, 8)
    arguments = {"level": level, "loss_scale_manager": MANAGERS[manager]()}
    return lossscale.build_train_network(network, momentum(network), nn.MSELoss(), **arguments), inputs(8)


def fixed_keep():
    network = mlp(8, 16, 8)
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9, loss_scale=1024.0)
    manager = lossscale.FixedLossScaleManager(1024.0, drop_overflow_update=False)
    return lossscale.build_train_network(network, optimizer, nn.MSELoss(), loss_scale_manager=manager), inputs(8)


def model():
    network = mlp(8, 16, 8)
    manager = lossscale.DynamicLossScaleManager()
    made = lossscale.Model(network, nn.MSELoss(), momentum(network), amp_level="O2", loss_scale_manager=manager)
    return made.train_network, inputs(8)


class Functional(nn.Cell):
    """A train step by hand from a functional scaler."""

    def __init__(self, scaler):
        super().__init__()
        network = mlp(8, 16, 8)
        self.network = nn.WithLossCell(network, nn.MSELoss())
        self.optimizer, self.scaler = momentum(network), scaler
        self.grad = ops.value_and_grad(self.forward, None, self.optimizer.parameters, has_aux=True)

    def forward(self, x, y):
        loss = self.network(x, y)
        return self.scaler.scale(loss), loss

    def construct(self, x, y):
        (_, loss), grads = self.grad(x, y)
        grads = self.scaler.unscale(grads)
        finite = lossscale.all_finite(grads)
        self.scaler.adjust(finite)
        if finite:
            loss = ops.depend(loss, self.optimizer(grads))
        return loss


class Sparse(nn.Cell):
    """An embedding whose gradient is a RowTensor."""

    def __init__(self):
        super().__init__()
        target = "CPU" if ms.get_context("device_target") == "CPU" else "DEVICE"
        self.lookup = nn.EmbeddingLookup(20, 4, param_init="ones", target=target, sparse=True)
        self.dense = nn.Dense(4, 1)

    def construct(self, ids):
        return self.dense(self.lookup(ids)).mean()


def sparse():
    network = Sparse()
    optimizer = nn.LazyAdam(network.trainable_params(), 0.1)
    return lossscale.TrainOneStepWithLossScaleCell(network, optimizer, dynamic()), (Tensor([1, 3, 3], ms.int32),)


def lenet():
    return train_cell(LeNet5()), (Tensor(np.ones((2, 1, 32, 32), np.float32)), Tensor(np.ones((2, 10), np.float32)))


def transformer():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    network = nn.TransformerEncoder(layer, 13)  # 16 parameters a layer
    return train_cell(network), (Tensor(np.ones((2, 4, 16), np.float32)), Tensor(np.ones((2, 4, 16), np.float32)))


def infnan(made):
    """Return a case whose train cell checks as on Ascend 910B, by INFNAN mode."""
    cell, x = made
    cell.ascend_910b_target = True
    return cell, x


def stock(**options):
    return {"base": nn.TrainOneStepWithLossScaleCell, "scale": lambda: nn.DynamicLossScaleUpdateCell(2**16, 2, 1000)}


def fused(name, *arguments):
    return lambda network: getattr(lossscale, name)(network.trainable_params(), *arguments)


class Sharded(nn.Cell):
    """Two layers, sharded over data and model, or as MindSpore likes where no strategy is given."""

    def __init__(self, data=2, model=4, shard=True):
        super().__init__()
        self.first = Parameter(Tensor(np.ones((16, 32), np.float32)), name="first")
        self.second = Parameter(Tensor(np.ones((32, 16), np.float32)), name="second")
        self.matmul1, self.matmul2, self.relu = ops.MatMul(), ops.MatMul(), ops.ReLU()
        self.square, self.mean = ops.Square(), ops.ReduceMean()
        if shard:
            self.matmul1.shard(((data, 1), (1, model)))
            self.relu.shard(((data, model),))
            self.matmul2.shard(((data, model), (model, 1)))

    def construct(self, x):
        hidden = self.relu(self.matmul1(x, self.first))
        return self.mean(self.square(self.matmul2(hidden, self.second)))


def sharded(shard=True, base=lossscale.TrainOneStepWithLossScaleCell, scale=dynamic, network=None, **options):
    network = network or Sharded(shard=shard)
    return base(network, momentum(network), scale(), **options).set_train(), (Tensor(np.ones((16, 16), np.float32)),)


CASES: dict[str, Callable] = {
    "stock": lambda: small(**stock()),
    "dynamic": small,
    "fixed": lambda: small(scale=lambda: lossscale.FixedLossScaleUpdateCell(1024.0)),
    "tensor": lambda: small(scale=lambda: Tensor(1024.0)),
    "scale of the call": scale_of_the_call,
    "accumulate": lambda: small(accumulate_steps=2),
    "clip by global norm": lambda: small(clip_grad=lossscale.ClipByGlobalNorm(1.0)),
    "clip by norm": lambda: small(clip_grad=lossscale.ClipByNorm(1.0)),
    "clip by value": lambda: small(clip_grad=lossscale.ClipByValue(1.0)),
    "ema": lambda: small(ema=lossscale.EMA(0.99, warmup=True)),
    "keep overflows": lambda: small(drop_overflow_update=False),
    "all outputs": lambda: small(outputs=EVERYTHING["outputs"]),
    "everything": lambda: small(**everything()),
    "limits": lambda: small(
        scale=lambda: lossscale.DynamicLossScaleUpdateCell(2.0**16, 2, 9, max_loss_scale=2.0**20, hysteresis=2)
    ),
    "infnan": lambda: infnan(small()),
    "infnan, everything": lambda: infnan(small(**everything())),
    "custom": custom,
    "model": model,
    "fixed manager, keep": fixed_keep,
    "dynamic scaler": lambda: (Functional(lossscale.DynamicLossScaler(1024.0, 2, 10)), inputs(8)),
    "static scaler": lambda: (Functional(lossscale.StaticLossScaler(1024.0)), inputs(8)),
    "no scaler": lambda: (Functional(lossscale.NoOpLossScaler()), inputs(8)),
    "fused momentum": lambda: small(optimizer=fused("FusedMomentum", 0.1, 0.9)),
    "fused adam": lambda: small(optimizer=fused("FusedAdamWeightDecay", 0.1)),
    "sparse": sparse,
    "lenet": lenet,
    "transformer": transformer,
    "120 parameters": deep,
    "120 parameters, stock": lambda: deep(**stock()),
    "120 parameters, everything": lambda: deep(**everything()),
    "sharded, stock": lambda: sharded(**stock()),
    "sharded": sharded,
    "sharded, clip": lambda: sharded(clip_grad=lossscale.ClipByGlobalNorm(1.0)),
    "sharded, clip by norm": lambda: sharded(clip_grad=lossscale.ClipByNorm(1.0)),
    "sharded, every norm": lambda: sharded(**{**everything(), "accumulate_steps": 1}),
    "sharded, accumulate": lambda: sharded(**summing()),
    "not sharded": lambda: sharded(shard=False),
    "not sharded, clip": lambda: sharded(shard=False, clip_grad=lossscale.ClipByGlobalNorm(1.0)),
    "not sharded, every norm": lambda: sharded(shard=False, **{**everything(), "accumulate_steps": 1}),
    "not sharded, accumulate": lambda: sharded(shard=False, **summing()),
    "sharded, sums without norms": lambda: sharded(**everything()),
    "pipeline": lambda: sharded(network=nn.PipelineCell(Sharded(shard=False), 2)),
}
CASES |= {
    f"{level}, {manager}": lambda level=level, manager=manager: built(level, manager)
    for level in ("O0", "O1", "O2", "O3", "auto")
    for manager in MANAGERS
}


def set_up(options) -> None:
    """Choose device, mode and ranks."""
    ms.set_device(options.device)
    ms.set_context(mode=ms.GRAPH_MODE, jit_level=options.jit_level)
    if options.parallel == "stand_alone":
        return
    ms.communication.init()
    ms.set_auto_parallel_context(parallel_mode=options.parallel, gradients_mean=True)
    if options.optimizer_parallel:
        ms.set_auto_parallel_context(enable_parallel_optimizer=True, parallel_optimizer_config={})


def main() -> None:
    """Compile the named cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--device", required=True)
    parser.add_argument("--jit-level", default="O0")
    parser.add_argument("--parallel", default="stand_alone")
    parser.add_argument("--optimizer-parallel", action="store_true")
    options = parser.parse_args()
    set_up(options)
    for name in options.names:
        dump = options.folder / name.replace(" ", "_").replace(",", "")
        ms.set_context(save_graphs=2, save_graphs_path=str(dump))
        error = ""
        try:
            cell, arguments = CASES[name]()
            cell.compile(*arguments)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        print(json.dumps({"case": name, "dump": str(dump), "error": error[:2000]}), flush=True)


if __name__ == "__main__":
    main()
