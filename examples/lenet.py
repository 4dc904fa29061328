"""Train LeNet5 on real digits in float16, with the loss scaled dynamically: `make train`."""

import argparse
import sys
from pathlib import Path

import mindspore as ms
from mindspore import Tensor, nn
from mindspore.train import Callback

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python examples/lenet.py`

from examples.data import batches, digits, mnist
from examples.nets import LeNet5
from lossscale import (
    DynamicLossScaleManager,
    FixedLossScaleManager,
    LossScaleMonitor,
    Model,
    fast_convolutions,
    find_loss_scale,
    plot_history,
)

FIXED_SCALE = 1024.0


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device", default="CPU", choices=["CPU", "GPU", "Ascend"])
    parser.add_argument("--mode", default="GRAPH", choices=["GRAPH", "PYNATIVE"])
    parser.add_argument("--amp-level", default="O2", choices=["O0", "O1", "O2", "O3", "auto"])
    parser.add_argument(
        "--manager",
        default="dynamic",
        choices=["dynamic", "fixed", "fixed-keep", "none"],
        help="how the loss is scaled; fixed-keep updates the weights on an overflow too",
    )
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data-dir", help="a folder with the four MNIST idx files, in place of the digits")
    parser.add_argument("--out-dir", default="out", help="where the history and the pictures go")
    parser.add_argument("--pictures", default="png", choices=["png", "svg", "pdf"], help="their format")
    return parser.parse_args()


def make_manager(name):
    if name == "dynamic":
        return DynamicLossScaleManager()  # starts at 2**24, halved on an overflow, doubled after 2000 clean steps
    if name == "fixed":
        return FixedLossScaleManager(FIXED_SCALE)
    if name == "fixed-keep":
        return FixedLossScaleManager(FIXED_SCALE, drop_overflow_update=False)
    return None


class EpochLine(Callback):
    """One line an epoch: loss, test accuracy, loss scale, overflows so far."""

    def __init__(self, monitor):
        super().__init__()
        self.monitor = monitor

    def on_train_epoch_end(self, run_context):
        params = run_context.original_args()
        steps = self.monitor.history[-params.batch_num :]
        self.monitor.write(
            f"epoch {params.cur_epoch_num:2d}: loss={sum(step['loss'] for step in steps) / len(steps):.4f} "
            f"accuracy={params.eval_results['accuracy']:.4f} loss_scale={steps[-1]['next_loss_scale']:.0f} "
            f"overflows={steps[-1]['overflows']}"
        )


class WithFloat32(nn.Cell):
    """A loss function of float32, as the amp levels compute it."""

    def __init__(self, loss_fn):
        super().__init__()
        self.loss_fn = loss_fn

    def construct(self, logits, labels):
        return self.loss_fn(logits.astype(ms.float32), labels)


def main():
    args = parse_arguments()
    train_data, test_data = mnist(args.data_dir) if args.data_dir else digits()
    ms.set_device(args.device)
    ms.set_context(mode=getattr(ms, f"{args.mode}_MODE"))
    fast_convolutions()
    ms.set_seed(args.seed)

    # With fixed-keep nobody but the optimizer divides the gradients by the scale.
    in_optimizer = FIXED_SCALE if args.manager == "fixed-keep" else 1.0
    train_batches = batches(*train_data, args.batch_size)
    test_batches = batches(*test_data, args.batch_size, shuffle=False)
    steps = train_batches.get_dataset_size()
    network = LeNet5()
    learning_rate = nn.cosine_decay_lr(0.0, 0.03, args.epochs * steps, steps, args.epochs)
    optimizer = nn.Momentum(network.trainable_params(), learning_rate, momentum=0.9, loss_scale=in_optimizer)
    model = Model(
        network,
        nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"),
        optimizer,
        metrics={"accuracy"},
        amp_level=args.amp_level,
        loss_scale_manager=make_manager(args.manager),
    )

    out = Path(args.out_dir)
    monitor = LossScaleMonitor(out / "lenet.jsonl")
    model.fit(args.epochs, train_batches, test_batches, callbacks=[monitor, EpochLine(monitor)])

    accuracy = model.eval(test_batches)["accuracy"]
    pictures = [plot_history(monitor.history, out / f"lenet_history.{args.pictures}")]
    if args.amp_level != "O0":
        sample = [(Tensor(train_data[0][i : i + 32]), Tensor(train_data[1][i : i + 32])) for i in (0, 32, 64, 96)]
        loss_fn = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
        report = find_loss_scale(network, WithFloat32(loss_fn), sample)
        pictures.append(report.plot(out / f"lenet_gradients.{args.pictures}"))
    last = monitor.history[-1]
    print(
        f"accuracy={accuracy:.4f} loss_scale={last['next_loss_scale'] * in_optimizer:.0f} "
        f"overflows={last['overflows']} steps={last['step']}"
    )
    print("pictures: " + ", ".join(map(str, pictures)))


if __name__ == "__main__":
    main()
