"""The progress bar of the examples that train with `Model`."""

from mindspore.train import Callback
from tqdm import tqdm


class Progress(Callback):
    """A bar over all steps and one line an epoch: loss, test accuracy, loss scale, overflows so far.

    A train step with loss scaling returns (loss, overflow, loss_scale); without it there is just the loss, and
    the scale is `fixed_scale`.
    """

    def __init__(self, fixed_scale=1.0):
        super().__init__()
        self.loss_scale = fixed_scale
        self.overflows = 0
        self.steps = 0
        self.losses = []

    def on_train_begin(self, run_context):
        params = run_context.original_args()
        self.bar = tqdm(total=params.epoch_num * params.batch_num, unit="step", dynamic_ncols=True)

    def on_train_step_end(self, run_context):
        outputs = run_context.original_args().net_outputs
        if isinstance(outputs, tuple):
            outputs, overflow, loss_scale = outputs
            self.overflows += int(overflow.asnumpy())
            self.loss_scale = float(loss_scale.asnumpy())
        self.losses.append(float(outputs.asnumpy()))
        self.steps += 1
        self.bar.update()

    def on_train_epoch_end(self, run_context):
        params = run_context.original_args()
        loss = sum(self.losses) / len(self.losses)
        self.losses.clear()
        self.bar.write(
            f"epoch {params.cur_epoch_num:2d}: loss={loss:.4f} accuracy={params.eval_results['accuracy']:.4f} "
            f"loss_scale={self.loss_scale:.0f} overflows={self.overflows}"
        )

    def on_train_end(self, run_context):
        self.bar.close()
