"""The charges that are written into a chat template before it is compiled."""

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

# Names of filters that no template can spell.
CHARGE = "(charge)"
"""Charges a turn through a body by the body's size."""
MADE = "(made)"
"""Charges a new value by its own size."""
READ = "(read)"
"""Charges a value by the size of all that it holds."""
SEARCHED = "(searched)"
"""Charges a value in which another is looked up."""
TEXT = "(text)"
"""Makes a value text, and charges that."""

_NODE = 4
"""Charge for each expression of a body."""


class Metering(NodeTransformer):
    """Wraps what a template computes into filters that charge it."""

    def metered(self, template: nodes.Template) -> nodes.Template:
        """Return the template with its charges."""
        metered = self.visit(template)
        assert isinstance(metered, nodes.Template), "a template stays one"
        return metered

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Charge each turn, and each element that a condition leaves out."""
        charge = _charge(node)
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_truth(charge), node.test, lineno=node.lineno)
        node.body.insert(0, _statement(charge))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        """Charge each call."""
        return self._with_charged_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        """Charge each call."""
        return self._with_charged_body(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        """Charge each use."""
        return self._with_charged_body(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        """Charge the text that is put out."""
        self.generic_visit(node)
        node.nodes = [
            part if isinstance(part, nodes.TemplateData) else _filtered(part, TEXT)
            for part in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Charge the parts of `a ~ b`."""
        self.generic_visit(node)
        node.nodes = [_filtered(part, TEXT) for part in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Charge both sides, which may be compared to the end."""
        self.generic_visit(node)
        node.expr = _filtered(node.expr, READ)
        for operand in node.ops:
            is_search = operand.op in ("in", "notin")
            operand.expr = _filtered(operand.expr, SEARCHED if is_search else READ)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Charge slices."""
        self.generic_visit(node)
        return _filtered(node, MADE) if isinstance(node.arg, nodes.Slice) else node

    def _with_charged_body(self, node: nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        charge = _charge(node)
        self.generic_visit(node)
        node.body.insert(0, _statement(charge))
        return node


def _charge(node: nodes.Node) -> nodes.Expr:
    """Return the expression that charges a turn through `node`."""
    text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
    size = text + _NODE * sum(1 for _ in node.find_all(nodes.Expr))
    return _filtered(nodes.Const(size, lineno=node.lineno), CHARGE)


def _statement(charge: nodes.Expr) -> nodes.Stmt:
    return nodes.ExprStmt(charge, lineno=charge.lineno)


def _truth(charge: nodes.Expr) -> nodes.Expr:
    return nodes.Or(charge, nodes.Const(True, lineno=charge.lineno), lineno=charge.lineno)


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
