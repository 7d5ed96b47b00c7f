"""On the path of scripts that train by torch's DDP alone: leave its threads time to let go of the last exchange.

A script of DDP that ends within milliseconds of an exchange may abort: gloo's thread holds Python objects of the
exchange and asks for the interpreter that is being taken down. Sessions see to this themselves.
"""

import atexit
import time

atexit.register(time.sleep, 0.5)
