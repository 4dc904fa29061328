"""Real images for the examples: scikit-learn's digits, or a folder with the MNIST idx files."""

import gzip
import struct
from pathlib import Path

import mindspore.dataset as ds
import numpy as np
from mindspore import Tensor
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

MNIST_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def digits():
    """Return ((images, labels) to train, (images, labels) to test): 1437 and 360 real handwritten digits.

    The 8x8 images are enlarged to LeNet's 1x32x32, float32 with mean near 0 and deviation near 1; labels are int32.
    """
    images, labels = load_digits(return_X_y=True)
    images = np.kron((images.reshape(-1, 1, 8, 8) / 16 - 0.3) / 0.4, np.ones((4, 4)))
    train_images, test_images, train_labels, test_labels = train_test_split(
        images.astype(np.float32), labels.astype(np.int32), test_size=0.2, random_state=0, stratify=labels
    )
    return (train_images, train_labels), (test_images, test_labels)


def mnist(folder):
    """Return what `digits` returns, from the four idx files (plain or .gz) in `folder`; 28x28 padded to 32x32."""
    sets = []
    for images_name, labels_name in MNIST_FILES.values():
        images = read_idx(Path(folder) / images_name, dimensions=3)
        labels = read_idx(Path(folder) / labels_name, dimensions=1)
        if images.shape[1:] != (28, 28) or len(images) != len(labels):
            raise SystemExit(
                f"{Path(folder) / images_name} holds {images.shape} and {labels_name} {labels.shape} values, but "
                "expected are images of 28x28 and as many labels."
            )
        padded = np.pad(images, ((0, 0), (2, 2), (2, 2)))[:, None]
        sets.append((((padded / 255 - 0.13) / 0.31).astype(np.float32), labels.astype(np.int32)))
    return tuple(sets)


def read_idx(path, dimensions):
    """Return the bytes of an idx file as an array, or end with a message that names the file."""
    if not path.exists():
        path = path.with_name(path.name + ".gz")
    if not path.exists():
        names = ", ".join(name for pair in MNIST_FILES.values() for name in pair)
        raise SystemExit(
            f"{path.with_suffix('')} is missing (so is {path.name}). --data-dir must hold the MNIST files {names}."
        )
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        magic, *shape = struct.unpack_from(f">{1 + dimensions}I", content)
        if magic != 0x0800 + dimensions:  # 0x08: unsigned bytes
            raise ValueError(f"it starts with {magic:#x} and not {0x0800 + dimensions:#x}")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, EOFError, ValueError, struct.error) as error:
        raise SystemExit(f"{path} is not a whole MNIST idx file: {error}.") from error


def batches(images, labels, batch_size, shuffle=True):
    """Return a MindSpore dataset of (images, labels) batches, shuffled anew in each epoch."""
    dataset = ds.NumpySlicesDataset((images, labels), column_names=["image", "label"], shuffle=shuffle)
    return dataset.batch(batch_size, drop_remainder=shuffle)


def accuracy(network, images, labels):
    """Return the share of `images` that `network` puts in the right class."""
    network.set_train(False)
    return float((network(Tensor(images)).asnumpy().argmax(axis=1) == labels).mean())
