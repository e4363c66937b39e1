"""`torchferry demo`: a worker is killed in mid-training, and the result does not show it.

    command      the options, the exit code
    coordinator  directs the demo: starts the workers, kills one, replaces it, collects the results
    crew         the worker processes, and the pipes to them
    worker       one worker: trains, and after a death rejoins and catches up
    group        the worker's process group, which is formed anew in every generation
    training     what is trained: a pure computation on a state
    scenario     how many workers, who is killed, and when
    proof        compares the final states, bit for bit
    messages     what coordinator and workers say to each other
    happenings   what the coordinator tells to whoever watches
    show         says it on the terminal

Nothing of it is imported by the library itself.
"""
