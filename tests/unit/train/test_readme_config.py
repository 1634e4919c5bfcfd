"""The run that the README shows is one that geojax accepts."""

import re
from pathlib import Path

from geojax.train.config import RunConfig

README = Path(__file__).resolve().parents[3] / "README.md"


def test_the_config_of_the_readme_is_valid(tmp_path):
    (block,) = re.findall(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)
    path = tmp_path / "run.yaml"
    path.write_text(block)
    config = RunConfig.load(path)
    assert config.mesh.devices == 512
    assert config.communication.gradient_compression == "int8"
