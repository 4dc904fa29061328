"""Package metadata. `make install` installs everything that development needs."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "lossscale/__init__.py").read_text(), re.M).group(1)

EXAMPLES = ["scikit-learn>=1.3", "tqdm>=4.60"]
TEST = ["hypothesis==6.170.15", "pytest==9.2.0", "pytest-cov==7.1.0", *EXAMPLES]
DEV = ["mypy==2.4.1", "ruff==0.17.5", *TEST]

setup(
    name="lossscale",
    version=VERSION,
    description="Loss scaling and mixed-precision train steps for MindSpore, on Ascend, GPU and CPU",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["mindspore", "loss scaling", "mixed precision", "float16", "amp", "grad scaler"],
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["lossscale", "lossscale.*", "cells", "cells.*"]),
    package_data={"lossscale": ["py.typed"], "cells": ["py.typed"]},
    python_requires=">=3.9",
    # Every numpy 2 breaks operators of MindSpore 2.7 to 2.10 on CPU, whatever its own metadata says.
    install_requires=["mindspore>=2.7,<3", "numpy<2"],
    extras_require={"examples": EXAMPLES, "test": TEST, "dev": DEV},
    zip_safe=False,
)
