"""Fork a sequence while it is being generated, against a running `prefixcache serve`."""

from prefixcache_service import Branch, Client

with Client("localhost:50051") as c:
    stream = c.stream("The old lighthouse keeper", max_tokens=60, temperature=0)
    story = ""
    for delta in stream:
        story += delta.text
        if len(story) > 80:
            break
    # It goes on by itself; meanwhile, three other endings, each from where it is now.
    twists = [" Suddenly,", " But his daughter", " At midnight"]
    branches = [Branch(stream.sequence_id, text=twist) for twist in twists]
    for twist, out in zip(twists, c.fork(branches, max_tokens=20, temperature=0), strict=True):
        taken_over = f"{out.num_forked_tokens} of {out.num_prompt_tokens} tokens taken over"
        print(f"…{twist}{out.text}   [{taken_over}]")
    print(f"The old lighthouse keeper{stream.result().text}")
