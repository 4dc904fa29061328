"""`Model` for which `loss_scale_manager=` works on every device."""

from typing import Any, Optional

import mindspore
from mindspore import nn

from lossscale.train_network import build_scaled, check_known, check_level, check_loss_fn, manager_of_level

_KNOWN_ARGUMENTS = ("loss_scale_manager", "keep_batchnorm_fp32", "boost_config_dict", "acc_level")


class Model(mindspore.Model):
    """`mindspore.Model` with the loss scaled by this library's train step, on CPU too.

    The same arguments and methods: `train`, `eval`, `fit`, `predict`, metrics, callbacks, sink mode. Where an
    optimizer and a manager that skips overflowing steps are given (or ``amp_level="O2"``, which brings a dynamic
    one), each step returns (loss, overflow, loss_scale); callbacks find it in `net_outputs`. ``Model(train_cell)``
    trains with a train cell of one's own.

    Args:
        network, loss_fn, optimizer, metrics, eval_network, eval_indexes, amp_level, boost_level: see
            `mindspore.Model`.
        **kwargs: `loss_scale_manager` (None: no scaling), `keep_batchnorm_fp32`, `boost_config_dict`, `acc_level`.

    Raises:
        ValueError: as `build_train_network`, and if a manager is given without an optimizer.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from lossscale import DynamicLossScaleManager, Model
        >>> from mindspore import nn
        >>> net = nn.Dense(4, 1)
        >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> model = Model(net, nn.MSELoss(), optimizer, amp_level="O2", loss_scale_manager=DynamicLossScaleManager())
        >>> type(model.train_network).__name__
        'TrainOneStepWithLossScaleCell'
    """

    _optimizer: Any
    _loss_scale_manager: Any
    _loss_scale_manager_set: bool

    def __init__(
        self,
        network: nn.Cell,
        loss_fn: Optional[Any] = None,
        optimizer: Optional[nn.Cell] = None,
        metrics: Optional[Any] = None,
        eval_network: Optional[nn.Cell] = None,
        eval_indexes: Optional[list] = None,
        amp_level: str = "O0",
        boost_level: str = "O0",
        **kwargs: Any,
    ):
        check_known(kwargs, _KNOWN_ARGUMENTS, "Model")
        check_loss_fn(loss_fn, "Model")
        check_level("amp_level", amp_level, "Model")
        check_level("boost_level", boost_level, "Model")
        super().__init__(
            network, loss_fn, optimizer, metrics, eval_network, eval_indexes, amp_level, boost_level, **kwargs
        )

    def _build_train_network(self) -> nn.Cell:
        if self._optimizer is None:
            return super()._build_train_network()
        if not self._loss_scale_manager_set:
            self._loss_scale_manager = manager_of_level(self._amp_level)
            self._loss_scale_manager_set = True
        manager = self._loss_scale_manager

        optimizer = self._optimizer

        def build(stock_optimizer, stock_manager):
            self._optimizer, self._loss_scale_manager = stock_optimizer, stock_manager
            try:
                return super(Model, self)._build_train_network()
            finally:
                self._optimizer, self._loss_scale_manager = optimizer, manager

        return build_scaled(build, self._network, self._optimizer, manager, self._boost_level)
