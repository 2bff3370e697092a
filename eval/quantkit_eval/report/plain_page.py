"""A narrow page of words, drawings and tables without navigation; a package gives the content and its own style."""

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

OWN_PACKAGE = "quantkit_eval.report"


def render_plain_page(package: str, name: str, **values: Any) -> str:
    """The page as HTML that loads nothing. The same values give the same text.

    Args:
        package: has ``templates/NAME.html.j2``, which extends ``plain.html.j2`` with the blocks ``title`` and
            ``content``, and ``templates/NAME.css``, which follows the style of all plain pages.
        name: of both files.
        values: what the template asks for; a value that is missing is an error.
    """
    style = _text(OWN_PACKAGE, "plain.css") + _text(package, f"{name}.css")
    return environment(package).get_template(f"{name}.html.j2").render(style=Markup(style), **values)


@cache
def environment(package: str = OWN_PACKAGE) -> Environment:
    """The templates of a package, and behind them those of the report."""
    packages = dict.fromkeys((package, OWN_PACKAGE))
    return Environment(
        loader=ChoiceLoader([PackageLoader(each, "templates") for each in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _text(package: str, name: str) -> str:
    return files(package).joinpath("templates", name).read_text(encoding="utf-8")
