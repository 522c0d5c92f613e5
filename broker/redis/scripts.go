package redis

import (
	"context"
	"crypto/sha1"
	_ "embed"
	"encoding/hex"
	"strings"

	goredis "github.com/redis/go-redis/v9"
)

// script is a Lua script, which the server runs as one step.
type script struct{ source, sha string }

// newScript makes a script of a source and of what it shares with others, which comes behind the first line.
func newScript(source string, shared ...string) *script {
	first, rest, _ := strings.Cut(source, "\n")
	source = first + "\n" + strings.Join(shared, "") + rest
	sum := sha1.Sum([]byte(source))
	return &script{source: source, sha: hex.EncodeToString(sum[:])}
}

var (
	//go:embed lua/remove.lua
	removeSource string
	//go:embed lua/settle.lua
	settleSource string
	//go:embed lua/copy.lua
	copySource string
	//go:embed lua/due.lua
	dueSource string
	//go:embed lua/claim.lua
	claimSource string
	//go:embed lua/giveback.lua
	giveBackSource string
	//go:embed lua/renew.lua
	renewSource string
	//go:embed lua/register.lua
	registerSource string
	//go:embed lua/leave.lua
	leaveSource string
	//go:embed lua/upkeep.lua
	upkeepSource string
	//go:embed lua/orphans.lua
	orphansSource string

	//go:embed lua/delete.lua
	deleteSource string
	//go:embed lua/count.lua
	countSource string

	settleScript   = newScript(settleSource, removeSource)
	copyScript     = newScript(copySource, removeSource)
	dueScript      = newScript(dueSource)
	claimScript    = newScript(claimSource)
	giveBackScript = newScript(giveBackSource)
	renewScript    = newScript(renewSource)
	registerScript = newScript(registerSource)
	leaveScript    = newScript(leaveSource)
	upkeepScript   = newScript(upkeepSource)
	orphansScript  = newScript(orphansSource)
	deleteScript   = newScript(deleteSource)
	countScript    = newScript(countSource)
)

// run runs a script on the server of its first key, and returns what it returned as a list. A server that does not
// know it yet gets it whole; nothing was done then.
func (n *nodes) run(ctx context.Context, s *script, keys []string, args []any) ([]any, error) {
	cmd := goredis.NewCmd(ctx, scriptArgs("EVALSHA", s.sha, keys, args)...)
	err := n.exec(ctx, keys[0], cmd)
	if begins(err, "NOSCRIPT") {
		cmd = goredis.NewCmd(ctx, scriptArgs("EVAL", s.source, keys, args)...)
		err = n.exec(ctx, keys[0], cmd)
	}
	if err != nil {
		return nil, err
	}
	out, ok := cmd.Val().([]any)
	if !ok {
		return []any{cmd.Val()}, nil
	}
	return out, nil
}

// runRaw is run with the answer as it came.
func (n *nodes) runRaw(ctx context.Context, s *script, keys []string, args []any) ([]byte, error) {
	cmd := goredis.NewRawCmd(ctx, scriptArgs("EVALSHA", s.sha, keys, args)...)
	err := n.exec(ctx, keys[0], cmd)
	if begins(err, "NOSCRIPT") {
		cmd = goredis.NewRawCmd(ctx, scriptArgs("EVAL", s.source, keys, args)...)
		err = n.exec(ctx, keys[0], cmd)
	}
	return cmd.Val(), err
}

func scriptArgs(command, script string, keys []string, args []any) []any {
	all := make([]any, 0, 3+len(keys)+len(args))
	all = append(all, command, script, len(keys))
	for _, k := range keys {
		all = append(all, k)
	}
	return append(all, args...)
}
