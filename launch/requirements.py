"""Print the requirements of pyproject.toml for some extras, one argument each: `requirements.py cpu,train,test`.

`make setup` installs these in one resolution, before the package itself is built (its native parts need torch).
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
wanted = list(project["dependencies"])
for extra in sys.argv[1].split(","):
    wanted += project["optional-dependencies"][extra]
print(*(requirement.replace(" ", "") for requirement in wanted))
