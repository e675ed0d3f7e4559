"""Forward hooks inside compiled code: everything that touches Dynamo or inductor.

`detection` is always imported and imports no compiler. The other modules are imported when something is compiled.
"""
