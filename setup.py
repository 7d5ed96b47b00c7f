"""What pyproject.toml cannot say: `profiles/` of the repository is installed as data of `planner`."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithProfiles(build_py):
    """Copies `profiles/` into the package that is built; an editable install finds it in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree("profiles", Path(self.build_lib) / "planner" / "profiles", dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithProfiles})
