"""No module imports itself by way of others; imports inside functions count, too."""

from graphlib import TopologicalSorter

import grimp


def test_imports_have_no_circle():
    graph = grimp.build_graph("ppo_rlhf", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError with the circle
