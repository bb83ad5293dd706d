"""Add the API pages to those in docs, from the names that the package publishes.

A hook of MkDocs, for `make docs`. An object's docstring is looked up where the object says that it
is defined, so nothing here needs an edit when a module moves. The examples are copied beside the
pages that link to them.
"""

import inspect
from pathlib import Path

import torch
from mkdocs.structure.files import File

from liger_kernel import _public, chunked_loss, transformers
from liger_kernel.ops import functional

EXAMPLES = Path(__file__).parent.parent / "examples"
PATCHES = "apply_liger_kernel", "revert", "AutoLigerKernelForCausalLM"
FAMILY = "apply_liger_kernel_to_"


def on_files(files, config):
    for name, text in pages().items():
        files.append(File.generated(config, f"api/{name}.md", content=text))
    for path in sorted(EXAMPLES.iterdir()):
        if path.is_file():
            files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Change the links to ../examples: in the site the examples lie beside the pages."""
    return markdown.replace("](../examples/", "](examples/")


def pages() -> dict[str, str]:
    """Return the Markdown of each page by its name."""
    published = {name: getattr(transformers, name) for name in transformers.__all__}
    functions = {name: getattr(functional, name) for name in functional.__all__}
    losses = {
        name: getattr(chunked_loss, name)
        for name in chunked_loss.__all__
        if name.endswith(("Loss", "Base"))
    }
    patches = {name: published[name] for name in PATCHES}
    modules = {name: value for name, value in published.items() if is_module(value)}
    family_functions = {n: value for n, value in published.items() if n.startswith(FAMILY)}
    return {
        "patch": f"""# Patch models

Import these from `liger_kernel.transformers`. What a patch does: [Patch a model](../patching.md).

{documented(patches)}
## {FAMILY}&lt;family&gt;

The functions of the families take the switches below. `model=` patches that model; without it
every model of the family is patched, those that exist and those that are built from now on. They
return a `Report`.

{families(family_functions)}
""",
        "modules": f"""# Modules

Import these from `liger_kernel.transformers`.

{documented(modules)}""",
        "functional": f"""# Functions

Import these from `liger_kernel.transformers.functional`.

{documented(functions)}""",
        "chunked_loss": f"""# Losses

Import these from `liger_kernel.chunked_loss`. Formulas and papers: [Losses](../losses.md).

{documented(losses)}""",
        "paths": f"""# Import paths

These are import paths of liger-kernel 0.8.5. Each is the same module as the one beside it.

{paths()}
""",
    }


def is_module(value) -> bool:
    return inspect.isclass(value) and issubclass(value, torch.nn.Module)


def documented(objects: dict[str, object]) -> str:
    """Return a directive of mkdocstrings for each object, by the path of its definition."""
    text = ""
    for name, value in objects.items():
        if value.__name__ != name:
            text += f"`{name}` is another name of the following.\n\n"
        text += f"::: {value.__module__}.{value.__qualname__}\n\n"
    return text


def families(functions: dict[str, object]) -> str:
    rows = [("function", "switches and their defaults"), ("---", "---")]
    for name, function in sorted(functions.items()):
        parameters = inspect.signature(function).parameters.values()
        switches = [f"`{p.name}={p.default}`" for p in parameters if isinstance(p.default, bool)]
        rows.append((f"`{name}`", ", ".join(switches)))
    return table(rows)


def paths() -> str:
    rows = [
        (f"`liger_kernel.{name}`", f"`liger_kernel.{home}`")
        for name, home in sorted(_public.HOMES.items())
    ]
    return table([("path", "the same module as"), ("---", "---"), *rows])


def table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
