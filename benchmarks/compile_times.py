"""How long do the functional scalers and `all_finite` take to compile, beside those of `mindspore.amp`?

`python -m benchmarks.compile_times` prints CPU seconds and their ratio for functions of 50 to 400 gradients.
"""

import time

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp

from lossscale import StaticLossScaler, all_finite

_OURS, _STOCK = StaticLossScaler(1024.0), amp.StaticLossScaler(1024.0)


def functions():
    """Return {row: (ours, stock)}: functions that no graph was compiled for yet."""

    def scale(*grads):
        return _OURS.scale(grads)

    def stock_scale(*grads):
        return _STOCK.scale(grads)

    def unscale(*grads):
        return _OURS.unscale(grads, keep_dtype=False)

    def stock_unscale(*grads):
        return _STOCK.unscale(grads)

    def unscale_nested(*grads):
        return _OURS.unscale({"first": grads[0], "others": [grads[1:3], (grads[3:],)]})

    def stock_unscale_nested(*grads):
        return _STOCK.unscale((grads[0], (grads[1:3], (grads[3:],))))

    def finite(*grads):
        return all_finite(grads)

    def stock_finite(*grads):
        return amp.all_finite(grads)

    def finite_nested(*grads):
        return all_finite({"first": grads[0], "others": [grads[1:3], (grads[3:],)]})

    return {
        "scale": (scale, stock_scale),
        "unscale": (unscale, stock_unscale),
        "unscale, nested": (unscale_nested, stock_unscale_nested),
        "all_finite": (finite, stock_finite),
        "all_finite, nested": (finite_nested, stock_finite),  # stock's takes flat tuples only
    }


def seconds(function, grads):
    """Return the CPU time of the first call of `function`, compiled."""
    start = time.process_time()
    ms.jit(function)(*grads)
    return time.process_time() - start


def compile_times(count, rounds=2):
    """Return {row: (ours, stock)} in CPU seconds for `count` gradients, the best of so many rounds."""
    grads = [Tensor(np.ones((2, number % 7 + 1), np.float32)) for number in range(count)]
    measured = [
        {row: tuple(seconds(each, grads) for each in pair) for row, pair in functions().items()} for _ in range(rounds)
    ]
    return {row: tuple(min(times) for times in zip(*(each[row] for each in measured))) for row in measured[0]}


def main():
    """Print a table."""
    print("gradients  row                 here/s  stock/s  ratio")
    for count in (50, 200, 400):
        for row, (ours, stock) in compile_times(count).items():
            print(f"{count:9}  {row:18}  {ours:6.2f}  {stock:7.2f}  {ours / stock:5.2f}")


if __name__ == "__main__":
    main()
