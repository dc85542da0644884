"""Which folders are packages. Everything else about the distribution is in pyproject.toml.

A script, because three trees make one import name: `deepinfer/`, `kernels/` as `deepinfer.kernels`
(a top-level `kernels` belongs to another project) and `tutorials/` as data for `deepinfer lab`.
The folders are looked up when the package is built, so a new kernel needs no line here.
"""

from setuptools import find_packages, setup

TREES = {"deepinfer": "deepinfer", "deepinfer.kernels": "kernels"}


def packages() -> list[str]:
    """The import name of every folder with an `__init__.py` in the package trees."""
    return [
        name
        for root, folder in TREES.items()
        for name in [root, *(f"{root}.{sub}" for sub in find_packages(folder))]
    ]


setup(
    packages=[*packages(), "deepinfer.tutorials"],
    package_dir={**TREES, "deepinfer.tutorials": "tutorials"},
    package_data={
        "*": ["py.typed", "*.pyi", "*.txt", "*.json", "*.safetensors", "*.md"],
        "deepinfer": ["**/*.txt", "**/*.json", "**/*.safetensors"],
        "deepinfer.tutorials": ["*.ipynb"],
    },
)
