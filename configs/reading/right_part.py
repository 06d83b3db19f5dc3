"""The keys of a job with right values, so that what is wrong between them is reported with the other mistakes."""

from collections.abc import Collection
from typing import Any

from configs.reading.keys import KeyPath, table_in
from configs.schema import Table


def right_part(table: type[Table], values: dict[str, Any], wrong: Collection[KeyPath], at: KeyPath = ()) -> Any:
    """Construct a table without its wrong keys; to read one of those raises AttributeError.

    Args:
        table: the class of the table.
        values: its values in the job; keys that are not among them have their defaults.
        wrong: the keys of the job that have no right value.
        at: the table's path in the job.
    """
    given: dict[str, Any] = {}
    lacking = {str(path[-1]) for path in wrong if path[:-1] == at}
    for name, field in table.model_fields.items():
        inner = table_in(field.annotation)
        value = values.get(name)
        if inner and isinstance(value, dict):
            given[name] = right_part(inner, value, wrong, (*at, name))
        elif inner and isinstance(value, list):
            if not all(isinstance(item, dict) for item in value):
                lacking.add(name)
                continue
            given[name] = [right_part(inner, item, wrong, (*at, name, i)) for i, item in enumerate(value)]
        elif name in values:
            given[name] = value
    made = table.model_construct(**given)
    for name in lacking:
        made.__dict__.pop(name, None)
    return made
