"""Forward hooks inside compiled code: everything that touches Dynamo or inductor.

Nothing here is imported before something is compiled.
"""
