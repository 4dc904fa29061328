"""Package metadata. `make install` installs everything that development needs."""

import re
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "lossscale/__init__.py").read_text(), re.M).group(1)

PROGRESS = ["tqdm>=4.60"]
PLOT = ["matplotlib>=3.7"]
NOTEBOOK = ["ipykernel>=6", "nbclient>=0.8", "nbformat>=5", "scikit-learn>=1.3", *PLOT]
EXAMPLES = ["scikit-learn>=1.3", *PROGRESS, *PLOT]
TEST = ["hypothesis==6.170.15", "pytest==9.2.0", "pytest-cov==7.1.0", "pytest-xdist==3.8.0", *EXAMPLES]
DEV = ["mypy==2.4.1", "ruff==0.17.5", *NOTEBOOK, *TEST]

# Optional: without a compiler the package installs all the same and works by plain MindSpore ops. Functions are
# compiled for several generations of x86 and chosen at run time, so -march stays that of the platform.
NATIVE = Extension(
    "cells._native",
    sources=[f"cells/native/{name}.cc" for name in ("kernels", "ops", "optimizers", "update_scale")],
    depends=[f"cells/native/{name}.h" for name in ("blocks", "kernels", "optimizers", "update_scale")],
    language="c++",
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-fvisibility=hidden",
        "-g0",
        "-ffp-contract=off",  # multiply-add only where the source says so
        "-fno-math-errno",
        "-fno-trapping-math",
    ],
    extra_link_args=["-pthread"],
    optional=True,
)

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
    ext_modules=[NATIVE],
    python_requires=">=3.9",
    # Every numpy 2 breaks operators of MindSpore 2.7 to 2.10 on CPU, whatever its own metadata says.
    install_requires=["mindspore>=2.7,<3", "numpy<2"],
    entry_points={"console_scripts": ["lossscale=lossscale.cli:main"]},
    extras_require={
        "progress": PROGRESS,
        "plot": PLOT,
        "examples": EXAMPLES,
        "notebook": NOTEBOOK,
        "test": TEST,
        "dev": DEV,
    },
    zip_safe=False,
)
