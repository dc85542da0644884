"""Which folders are packages. Everything else about the distribution is in pyproject.toml.

A script, because three trees make one import name: `deepinfer/`, `kernels/` as `deepinfer.kernels`
(a top-level `kernels` belongs to another project) and `tutorials/` as data for `deepinfer lab`.
The folders are looked up when the package is built, so a new kernel needs no line here.
"""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

TREES = {"deepinfer": "deepinfer", "deepinfer.kernels": "kernels"}
# Data of a tree, in any folder of it. (To setup(), "*" is no name for every package.)
DATA = [f"**/*.{kind}" for kind in ("txt", "txt.xz", "json", "safetensors", "md")]


class BuildPy(build_py):
    """Leaves the scripts beside the tutorials out of a wheel: only notebooks are shipped."""

    def find_package_modules(self, package, package_dir):
        found = super().find_package_modules(package, package_dir)
        return [] if package == "deepinfer.tutorials" else found


def packages() -> list[str]:
    """The import name of every folder with an `__init__.py` in the package trees."""
    return [
        name
        for root, folder in TREES.items()
        for name in [root, *(f"{root}.{sub}" for sub in find_packages(folder))]
    ]


setup(
    cmdclass={"build_py": BuildPy},
    packages=[*packages(), "deepinfer.tutorials"],
    package_dir={**TREES, "deepinfer.tutorials": "tutorials"},
    package_data={
        "deepinfer": ["py.typed", "__init__.pyi", *DATA],
        "deepinfer.kernels": DATA,
        "deepinfer.tutorials": ["*.ipynb"],
    },
    # in a wheel the folder itself stands in the place of this stub
    exclude_package_data={"deepinfer": ["kernels.pyi"]},
)
