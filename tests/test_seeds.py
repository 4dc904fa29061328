"""The calls of the documents that this project follows: in scripts of our own, and in the documents' own text.

The documents are not part of this repository. The environment variable LOSSSCALE_DOCS names a folder that holds
them; without it those tests are skipped. Their code runs as printed but for imports, names that they leave
undefined, and the stride of MaxPool2d, whose default has changed.
"""

import ast
import importlib.util
import os
import re
import sys
import textwrap
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.train import LossMonitor

import lossscale
from lossscale import (
    CustomTrainOneStepCell,
    DynamicLossScaleManager,
    FixedLossScaleManager,
    Model,
    TrainOneStepWithLossScaleCell,
    build_train_network,
)
from tests.lossscale.test_model import Record, dataset
from tests.nets import LeNet5, copy_parameters, mlp
from tests.oracles import same_bits


def momentum(net, **kwargs):
    return nn.Momentum(net.trainable_params(), learning_rate=0.01, momentum=0.9, **kwargs)


def fixed():
    return FixedLossScaleManager(), {}


def fixed_keep():
    return FixedLossScaleManager(1024.0, False), {"loss_scale": 1024.0}


def dynamic():
    with pytest.warns(UserWarning, match="scale_factor=3000"):
        return DynamicLossScaleManager(4, 3000), {}


@pytest.mark.parametrize("make", [fixed, fixed_keep, dynamic])
def test_model_with_a_manager_trains_as_without(mode, make):
    manager, options = make()
    nets, record = (mlp(), mlp()), Record()
    copy_parameters(*nets)
    start = nets[0].trainable_params()[0].asnumpy().copy()
    model = Model(
        nets[0],
        nn.MSELoss(),
        momentum(nets[0], **options),
        metrics={"loss": nn.Loss()},
        amp_level="O0",
        loss_scale_manager=manager,
    )
    model.train(epoch=3, train_dataset=dataset(), callbacks=[LossMonitor(), record], dataset_sink_mode=False)
    plain = ms.Model(nets[1], nn.MSELoss(), momentum(nets[1]))
    plain.train(epoch=3, train_dataset=dataset(), dataset_sink_mode=False)
    losses = [step[0] for step in record.numbers()]
    assert sum(losses[-4:]) < sum(losses[:4])
    for scaled, unscaled in zip(*(net.trainable_params() for net in nets)):
        np.testing.assert_allclose(scaled.asnumpy(), unscaled.asnumpy(), rtol=1e-5, atol=1e-7)
    assert not same_bits(start, nets[0].trainable_params()[0].asnumpy())


def test_custom_train_step_in_a_loop_and_in_model(mode):
    nets = [mlp() for _ in range(3)]
    steps = []
    for net in nets:
        copy_parameters(nets[0], net)
        optimizer = nn.AdamWeightDecay(net.trainable_params(), learning_rate=0.01)
        wrapped = nn.WithLossCell(net, nn.MSELoss())
        scaled = net is not nets[2]
        steps.append(
            CustomTrainOneStepCell(wrapped, optimizer, 1024.0) if scaled else unscaled_step(wrapped, optimizer)
        )
    for _ in range(2):
        for row in dataset().create_dict_iterator():
            steps[0](row["x"], row["y"])
            steps[2](row["x"], row["y"])
    Model(steps[1]).train(epoch=2, train_dataset=dataset(), dataset_sink_mode=False)
    for loop, model, unscaled in zip(*(net.trainable_params() for net in nets)):
        assert same_bits(loop.asnumpy(), model.asnumpy())
        assert same_bits(loop.asnumpy(), unscaled.asnumpy())


def unscaled_step(network, optimizer):
    return nn.TrainOneStepCell(network, optimizer).set_train()


class HalvedSteps(CustomTrainOneStepCell):
    def scale_grad(self, gradients):
        return self.hyper_map(ops.partial(_scale, self.reciprocal_sense * 0.5), gradients)


_scale = ops.MultitypeFuncGraph("scale")


@_scale.register("Tensor", "Tensor")
def _scale_tensor(factor, grad):
    return grad * ops.cast(factor, ops.dtype(grad))


def test_scale_grad_can_be_overridden(mode):
    nets = mlp(), mlp()
    copy_parameters(*nets)
    start = [p.asnumpy().copy() for p in nets[0].trainable_params()]
    for cls, net in zip((CustomTrainOneStepCell, HalvedSteps), nets):
        step = cls(nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params(), 0.5), 8.0)
        row = next(dataset().create_dict_iterator())
        step(row["x"], row["y"])
    for before, whole, half in zip(start, nets[0].trainable_params(), nets[1].trainable_params()):
        np.testing.assert_allclose(half.asnumpy() - before, (whole.asnumpy() - before) / 2, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.filterwarnings("ignore:The loss is float16:UserWarning")
def test_scale_as_the_last_input_of_a_call(mode, manual, shape):
    net = LeNet5()
    if manual:
        net.fc3.add_flags_recursive(fp32=True)
        net.add_flags_recursive(fp16=True)
    with_loss = nn.WithLossCell(net.set_train(), nn.MSELoss())
    if manual:
        train_network = TrainOneStepWithLossScaleCell(with_loss, momentum(net))
    else:
        train_network = build_train_network(with_loss, momentum(net), level="O2")
    image = Tensor(np.full((1, 1, 32, 32), 0.01, np.float32))
    label = Tensor(np.zeros((1, 10), np.float32))
    for scale in (1.0, 64.0):
        loss, overflow, used = train_network(image, label, Tensor(np.full(shape, scale, np.float32)))
        assert np.isfinite(float(loss))
        assert not bool(overflow)
        assert used.shape == shape
        assert float(used.asnumpy().reshape(())) == scale


FOLDER = os.environ.get("LOSSSCALE_DOCS")
needs_documents = pytest.mark.skipif(not FOLDER, reason="LOSSSCALE_DOCS does not name the documents' folder")


def document(marker):
    """The text of the one document that holds `marker`."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(FOLDER).iterdir()) if path.is_file()]
    (found,) = [text for text in texts if marker in text]
    return found


def code_blocks(text):
    """The Python blocks of a markdown text."""
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def with_our_imports(code):
    """Return `code` with only its import lines changed: what we bring comes from us."""
    lines = code.splitlines()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("mindspore"):
            names = [ast.unparse(alias) for alias in node.names]
            ours = [name for name in names if name in lossscale.__all__]
            theirs = [name for name in names if name not in ours and name != "amp"]
            new = [f"from lossscale import {', '.join(ours)}"] * bool(ours)
            new += [f"from {node.module} import {', '.join(theirs)}"] * bool(theirs)
            new += ["import lossscale as amp"] * ("amp" in names)
            lines[node.lineno - 1] = "; ".join(new)
            lines[node.lineno : node.end_lineno] = [""] * (node.end_lineno - node.lineno)
        if isinstance(node, ast.Import) and any(alias.asname == "ms" for alias in node.names):
            lines[node.lineno - 1] = "import lossscale as ms"
    return "\n".join(lines) + "\n"


def run(tmp_path, *parts):
    """Run code as a module in a file of its own, which GRAPH_MODE needs; return its names."""
    path = tmp_path / "script.py"
    path.write_text("\n".join(parts), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"script_of_{tmp_path.name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # MindSpore looks there for the names of what it compiles
    before = ms.get_context("mode")
    try:
        spec.loader.exec_module(module)
        return vars(module)
    finally:
        ms.set_context(mode=before)


def printed_losses(text):
    return [float(value) for value in re.findall(r"loss is ([-\w.]+)", text)]


@needs_documents
def test_guide_of_loss_scaling_as_printed(tmp_path, capsys):
    blocks = [with_our_imports(block) for block in code_blocks(document("## FixedLossScaleManager"))]
    names = run(tmp_path, *blocks[:4])
    losses = printed_losses(capsys.readouterr().out)
    assert len(losses) == 10 * 32
    assert np.isfinite(losses).all()
    assert isinstance(names["model"], Model)
    assert np.isfinite(float(names["result"]))
    assert names["CustomTrainOneStepCell"] is not CustomTrainOneStepCell
    assert all(np.isfinite(p.asnumpy()).all() for p in names["network"].get_parameters())


@needs_documents
def test_guide_of_loss_scaling_with_our_train_step(tmp_path):
    blocks = [with_our_imports(block) for block in code_blocks(document("## FixedLossScaleManager"))]
    definitions = blocks[0].split("# Initialize network")[0]
    names = run(tmp_path, definitions, "from lossscale import CustomTrainOneStepCell", *blocks[2:4])
    assert isinstance(names["net_with_train"], CustomTrainOneStepCell)
    assert np.isfinite(float(names["result"]))


@needs_documents
@pytest.mark.filterwarnings("ignore:.*scale_factor=3000:UserWarning")
def test_guide_of_loss_scaling_with_its_dynamic_manager(tmp_path, capsys):
    blocks = [with_our_imports(block) for block in code_blocks(document("## FixedLossScaleManager"))]
    before, rest = blocks[0].split("# Define Loss Scale, optimizer and model")
    names = run(tmp_path, before, blocks[4], "# Run training" + rest.split("# Run training")[1])
    losses = printed_losses(capsys.readouterr().out)
    assert len(losses) == 10 * 32
    assert np.isfinite(losses).all()
    assert isinstance(names["loss_scale_manager"], DynamicLossScaleManager)
    assert names["loss_scale_manager"].get_loss_scale() == 4
    assert isinstance(names["model"].train_network, TrainOneStepWithLossScaleCell)


UNDEFINED_NAMES = """\
import numpy as np
from mindspore import Tensor, nn
from mindspore import dtype as mstype
from mindspore.ops import operations as P
from mindspore.nn import Momentum, MSELoss, WithLossCell
from lossscale import TrainOneStepWithLossScaleCell
"""


@needs_documents
@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.filterwarnings("ignore:The loss is float16:UserWarning")
def test_guide_of_mixed_precision_as_printed(mode, tmp_path, block):
    code = code_blocks(document("amp.build_train_network("))[block]
    code = with_our_imports(code).replace("MaxPool2d(kernel_size=2)", "MaxPool2d(kernel_size=2, stride=2)")
    code = re.sub(r"^(predict = .*)$", r"\1\ninputs = predict", code, flags=re.M)
    names = run(tmp_path, UNDEFINED_NAMES, code)
    loss, overflow, scale = names["output"]
    assert isinstance(names["train_network"], TrainOneStepWithLossScaleCell)
    assert np.isfinite(float(loss))
    assert not bool(overflow)
    assert (scale.shape, float(scale.asnumpy()[0])) == ((1,), 1.0)


NET_OF_EXAMPLES = """\
from mindspore import nn

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(8, 4)

    def construct(self, x, y):
        return ((self.dense(x) - y) ** 2).mean()

"""


@needs_documents
@pytest.mark.parametrize("name", ["FixedLossScaleManager", "DynamicLossScaleManager"])
def test_manager_examples_as_printed(mode, tmp_path, name):
    docstring = re.search(rf'class {name}\(LossScaleManager\): """(.*?)"""', document("[文档]class"), re.S).group(1)
    lines = [part.strip() for part in docstring.split("Examples:")[1].split(">>>")]
    names = run(tmp_path, NET_OF_EXAMPLES, with_our_imports(textwrap.dedent("\n".join(lines))))
    assert isinstance(names["loss_scale_manager"], getattr(lossscale, name))
    record = Record()
    names["model"].train(1, dataset(), callbacks=[record], dataset_sink_mode=False)
    assert np.isfinite([step[0] for step in record.numbers()]).all()
