"""Package metadata of rlvla; the versions that are tested together are pinned in constraints.txt.

A release is built with RLVLA_PROJECT_URL, the address of the repository, which links of the README then lead to.
"""

import os
import re
from email.parser import HeaderParser
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = {}
exec((ROOT / "rlvla" / "version.py").read_text(encoding="utf-8"), VERSION)
# Label -> path in the repository.
PROJECT_LINKS = {
    "Documentation": "/blob/main/README.md#documentation",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Issues": "/issues",
    "Source": "",
}


def project_url() -> str:
    """RLVLA_PROJECT_URL, or what a source distribution was built with; "" if there is none."""
    if "RLVLA_PROJECT_URL" in os.environ or not (ROOT / "PKG-INFO").is_file():
        return os.environ.get("RLVLA_PROJECT_URL", "").rstrip("/")
    links = HeaderParser().parsestr((ROOT / "PKG-INFO").read_text(encoding="utf-8")).get_all("Project-URL", [])
    return next((link.partition(", ")[2] for link in links if link.startswith("Source, ")), "")


_CLONE = "In a clone of this repository:"  # of the README


def description_page(readme: str, url: str) -> str:
    """The README with absolute links, as a page that stands alone; without an address, words in their place.

    Links within the page and to other sites stay as they are. Files are those of the version's tag.
    """

    def image(match: re.Match) -> str:
        if re.match(r"\w+:", match["to"]):
            return match[0]
        return f"![{match['text']}]({url}/raw/{tag}/{match['to']})" if url else f"({match['text']})"

    def link(match: re.Match) -> str:
        if re.match(r"\w+:|#", match["to"]):
            return match[0]
        return f"[{match['text']}]({url}/blob/{tag}/{match['to']})" if url else match["text"]

    tag = f"v{VERSION['__version__']}"
    if url:
        readme = readme.replace(f"{_CLONE}\n\n```bash\n", f"{_CLONE}\n\n```bash\ngit clone {url} rlvla && cd rlvla\n")
    readme = re.sub(r"!\[(?P<text>[^\]]*)\]\((?P<to>[^)\s]+)\)", image, readme)
    # The text of a link may be an image, such as a badge.
    return re.sub(r"(?<!!)\[(?P<text>(?:!\[[^\]]*\]\([^)]*\)|[^\]])*)\]\((?P<to>[^)\s]+)\)", link, readme)


URL = project_url()

EXTRAS = {
    # LIBERO needs robosuite 1.4; 1.5 works as long as LIBERO is not used beside it.
    # termcolor: imported by robosuite 1.4, which does not declare it.
    "robosuite": [
        "robosuite>=1.4,<1.6",
        "mujoco>=3.0,<3.10",
        "numba>=0.59",
        "fast-simplification>=0.1.7",
        "termcolor>=2",
    ],
    # A vision-language model as a judge, behind an OpenAI-compatible server.
    "vlm": ["pydantic>=2.5"],
    # What LIBERO needs beside robosuite 1.4. hf-libero and bddl themselves come with --no-deps, because they would
    # bring torchvision and another torch: examples/scripts/install_libero.sh.
    "libero": [
        "robosuite>=1.4,<1.5",
        "mujoco>=3.0,<3.10",
        "numba>=0.59",
        "fast-simplification>=0.1.7",
        "termcolor>=2",
        "opencv-python>=4.8",
        "easydict>=1.10",
        "gymnasium>=0.29",
        "cloudpickle>=2",
        "future>=0.18",
        "pyyaml>=6",
        "huggingface_hub>=0.20",
    ],
    # What Meta-World needs; metaworld and imageio themselves come with --no-deps, because metaworld pins an older
    # MuJoCo: examples/scripts/install_metaworld.sh.
    "metaworld": ["mujoco>=3.0,<3.10", "gymnasium>=1.1", "scipy>=1.4.1", "fast-simplification>=0.1.7"],
    # fastapi, uvicorn, openai: `transformers serve`, which tests of the VLM reward start.
    "dev": [
        "fastapi",
        "uvicorn",
        "openai",
        "pytest>=8",
        "pytest-timeout>=2",
        "pytest-xdist>=3",
        "hypothesis>=6",
        "ruff>=0.6",
        "mypy>=1.10",
        "pre-commit>=3",
    ],
    # The pages and the API reference as a folder: examples/scripts/docs.sh. ruff formats signatures.
    "docs": ["mkdocs-material>=9.7", "mkdocstrings[python]>=1", "ruff>=0.6"],
    "video": ["av>=12"],
    "lerobot": ["av>=12", "pyarrow>=15"],
    # Environment workers on other machines.
    "ray": ["ray>=2.40"],
    "wandb": ["wandb>=0.17"],
    # Recordings of episodes for the viewer of rerun.io.
    "rerun": ["rerun-sdk>=0.23"],
    # Policies behind a socket.
    "serve": ["websockets>=13", "msgpack>=1"],
    # For an environment of its own, since its pins conflict with the trainer's: examples/scripts/install_vllm.sh.
    "vllm": ["vllm>=0.32"],
}
# What `all` leaves out: what is for work on rlvla itself, and what needs an environment of its own.
NOT_IN_ALL = {"dev", "docs", "vllm"}

setup(
    name="rlvla",
    version=VERSION["__version__"],
    description="Reinforcement-learning post-training of vision-language-action robot policies",
    long_description=description_page((ROOT / "README.md").read_text(encoding="utf-8"), URL),
    long_description_content_type="text/markdown",
    author="rlvla contributors",
    url=URL or None,
    project_urls={label: URL + path for label, path in PROJECT_LINKS.items()} if URL else {},
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=[
        "reinforcement learning",
        "vision-language-action",
        "robotics",
        "PPO",
        "GRPO",
        "OpenVLA",
        "robosuite",
        "LIBERO",
        "DeepSpeed",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    # The commands travel as rlvla.cli and are called rlvla-train-ppo-vla, rlvla-eval-vla, ...
    packages=[*find_packages(include=["rlvla", "rlvla.*"]), "rlvla.cli", "rlvla.recipes.files"],
    package_dir={"rlvla.cli": "cli", "rlvla.recipes.files": "recipes"},
    entry_points={
        "console_scripts": [
            "rlvla = rlvla.cli.__main__:main",  # lists the others
            *(
                f"rlvla-{path.stem.replace('_', '-')} = rlvla.cli.{path.stem}:main"
                for path in sorted(ROOT.glob("cli/[a-z]*.py"))
            ),
        ]
    },
    package_data={
        "rlvla": ["py.typed"],
        "rlvla.rewards.vlm": ["prompts/*.txt"],
        "rlvla.commands": ["templates/*.jinja", "gpu_rates.json"],
        "rlvla.evaluation": ["templates/*.jinja"],
        "rlvla.teleoperation": ["page.html"],
        "rlvla.recipes.files": ["*.yaml"],
    },
    install_requires=[
        "torch>=2.6",
        "numpy>=1.26",
        "transformers>=4.50",
        "tokenizers>=0.21",
        "safetensors>=0.4",
        # 0.19.0 sums gradients of bfloat16 weights in bfloat16 under ZeRO-2, whatever it is told.
        "deepspeed>=0.19.8",
        "peft>=0.14",
        "tensorboard>=2.16",
        "pillow>=10",
        "h5py>=3.10",
        "matplotlib>=3.8",
        "tqdm>=4.66",
        "pyyaml>=6",
        "scipy>=1.11",
        "jinja2>=3",
        "argcomplete>=3",
    ],
    extras_require={
        **EXTRAS,
        "all": sorted({package for name in EXTRAS.keys() - NOT_IN_ALL for package in EXTRAS[name]}),
    },
)
