"""placeholder"""
def check_first_step(*a): pass
