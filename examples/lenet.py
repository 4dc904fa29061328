"""Train LeNet5 on real digits in float16, with the loss scaled dynamically: `make train`."""

import argparse
import sys
from pathlib import Path

import mindspore as ms
from mindspore import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python examples/lenet.py`

from examples.data import batches, digits, mnist
from examples.nets import LeNet5
from examples.progress import Progress
from lossscale import DynamicLossScaleManager, FixedLossScaleManager, Model

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
    return parser.parse_args()


def make_manager(name):
    if name == "dynamic":
        return DynamicLossScaleManager()  # starts at 2**24, halved on an overflow, doubled after 2000 clean steps
    if name == "fixed":
        return FixedLossScaleManager(FIXED_SCALE)
    if name == "fixed-keep":
        return FixedLossScaleManager(FIXED_SCALE, drop_overflow_update=False)
    return None


def main():
    args = parse_arguments()
    train_data, test_data = mnist(args.data_dir) if args.data_dir else digits()
    ms.set_device(args.device)
    ms.set_context(mode=getattr(ms, f"{args.mode}_MODE"))
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

    progress = Progress(fixed_scale=in_optimizer)
    model.fit(args.epochs, train_batches, test_batches, callbacks=[progress])

    accuracy = model.eval(test_batches)["accuracy"]
    print(
        f"accuracy={accuracy:.4f} loss_scale={progress.loss_scale:.0f} "
        f"overflows={progress.overflows} steps={progress.steps}"
    )


if __name__ == "__main__":
    main()
